// Every kernel, written once over a vector type V of simd_*.h; included by one kernels_<isa>.cpp per
// instruction set.
//
// A range runs in steps of V::width; the elements left over run through Scalar, whose operations round alike,
// so that an element's result depends on its inputs alone: not on its place in the array, nor on how the
// array was cut into ranges.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "simd_scalar.h"

namespace tierstream {
namespace {

// The split master
//
// x, the fp32 master as uint32, is kept as weight, the bf16 nearest to x with ties away from zero, and low,
// the lower 16 bits of x. So weight is one above the upper half of x where low >= 0x8000, and joining takes
// that carry back. All of it is integer arithmetic modulo 2^32, so every x that is not a NaN comes back
// exactly: both zeros, subnormals, infinities, and also the finite x with |x| >= 0x7f7f8000 (3.396e38), whose
// nearest bf16 is infinite; these have weight = inf and low >= 0x8000, where an infinite x has low = 0. (The
// weight cannot be clamped to the largest finite bf16 instead: its 65,536 values of low are all taken.) A NaN
// would round to an infinity or carry into the sign; it is kept as a quiet NaN of the same sign with low = 0.

template <class V>
typename V::Float join(typename V::Bits weight, typename V::Bits low) {
    const auto carry = V::template shift_left<1>(V::bit_and(low, V::set_bits(0x8000)));
    return V::from_bits(V::sub(V::bit_or(V::template shift_left<16>(weight), low), carry));
}

template <class V>
typename V::Bits quiet_nan_half(typename V::Bits x) {
    return V::bit_or(V::template shift_right<16>(x), V::set_bits(0x0040));
}

template <class V>
void split(typename V::Float master, std::uint16_t* weight, std::uint16_t* low) {
    const auto x = V::bits(master);
    const auto rounded = V::template shift_right<16>(V::add(x, V::set_bits(0x8000)));
    V::store_u16(weight, V::if_nan(master, quiet_nan_half<V>(x), rounded));
    V::store_u16(low, V::if_nan(master, V::set_bits(0), V::bit_and(x, V::set_bits(0xffff))));
}

// bf16 by round to nearest, ties to even: add 0x7fff, and one more where the kept half is odd.
template <class V>
typename V::Bits nearest_even(typename V::Float value) {
    const auto x = V::bits(value);
    const auto odd = V::bit_and(V::template shift_right<16>(x), V::set_bits(1));
    const auto rounded = V::template shift_right<16>(V::add(x, V::add(odd, V::set_bits(0x7fff))));
    return V::if_nan(value, quiet_nan_half<V>(x), rounded);
}

// How many elements ahead `adamw` asks for the lines that it comes to. Two divisions and a root keep the
// processor so busy with few elements that its loads of later ones start too late, and its own prefetch follows
// five arrays at once less far than memory is away. Behind the end of an array a prefetch does nothing.
constexpr std::size_t prefetch_ahead = 512;

struct Fp32Gradient {
    static void prefetch(const Gradient& grad, std::size_t i) { __builtin_prefetch(grad.fp32 + i); }
    template <class V>
    static typename V::Float load(const Gradient& grad, std::size_t i) {
        return V::load(grad.fp32 + i);
    }
};

struct Bf16Gradient {
    static void prefetch(const Gradient& grad, std::size_t i) { __builtin_prefetch(grad.bf16 + i); }
    template <class V>
    static typename V::Float load(const Gradient& grad, std::size_t i) {
        return V::from_bits(V::template shift_left<16>(V::load_u16(grad.bf16 + i)));
    }
};

struct SplitMaster {
    static void prefetch(const AdamwArrays& a, std::size_t i) {
        __builtin_prefetch(a.weight + i);
        __builtin_prefetch(a.low + i);
    }
    template <class V>
    static typename V::Float load(const AdamwArrays& a, std::size_t i) {
        return join<V>(V::load_u16(a.weight + i), V::load_u16(a.low + i));
    }
    template <class V>
    static void store(const AdamwArrays& a, std::size_t i, typename V::Float x) {
        split<V>(x, a.weight + i, a.low + i);
    }
};

template <bool writes_weight>
struct Fp32Master {
    static void prefetch(const AdamwArrays& a, std::size_t i) {
        __builtin_prefetch(a.master + i);
        if constexpr (writes_weight) __builtin_prefetch(a.weight + i);
    }
    template <class V>
    static typename V::Float load(const AdamwArrays& a, std::size_t i) {
        return V::load(a.master + i);
    }
    template <class V>
    static void store(const AdamwArrays& a, std::size_t i, typename V::Float x) {
        V::store(a.master + i, x);
        if constexpr (writes_weight) V::store_u16(a.weight + i, nearest_even<V>(x));
    }
};

// The operations of torch.optim.AdamW(foreach=False, fused=False) in their order, each rounded as torch's
// vectorized CPU kernels round it (found by experiment, torch 2.13): lerp_ and addcmul_ fuse their last
// multiply-add, addcdiv_ does not. Two differences remain, both on torch's side. Its sqrt is MKL's, which is
// off by up to 1 ulp in about one element of six where ours is correctly rounded; and the last few elements
// of a torch tensor take a loop without fma.
//
// All loads come before all stores: planes begin at page borders, so an element's addresses agree in their
// lowest 12 bits, and a processor of Intel's lets a load wait for an earlier store that agrees in these, until
// the store retires, which here is behind the divisions of the elements before.
template <class V, class Master, class Grad>
std::size_t adamw_steps(const AdamwArrays& a, const AdamwScalars& s, std::size_t i, std::size_t end) {
    const auto grad_scale = V::set(s.grad_scale), decay = V::set(s.decay), lerp = V::set(s.lerp_coefficient);
    const auto beta2 = V::set(s.beta2), one_minus_beta2 = V::set(s.one_minus_beta2), eps = V::set(s.eps);
    const auto correction = V::set(s.bias_correction2_sqrt),
               negative_step_size = V::set(s.negative_step_size);
    for (; i + V::width <= end; i += V::width) {
        Master::prefetch(a, i + prefetch_ahead);
        Grad::prefetch(a.grad, i + prefetch_ahead);
        __builtin_prefetch(a.exp_avg + i + prefetch_ahead);
        __builtin_prefetch(a.exp_avg_sq + i + prefetch_ahead);
        const auto loaded_grad = Grad::template load<V>(a.grad, i);
        const auto param = Master::template load<V>(a, i);
        const auto old_avg = V::load(a.exp_avg + i), old_avg_sq = V::load(a.exp_avg_sq + i);
        const auto grad = V::mul(loaded_grad, grad_scale);
        // param.mul_(1 - lr * weight_decay)
        const auto decayed = V::mul(param, decay);
        // exp_avg.lerp_(grad, 1 - beta1)
        const auto avg = V::fma(lerp, V::sub(grad, old_avg), s.lerp_from_grad ? grad : old_avg);
        V::store(a.exp_avg + i, avg);
        // exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        const auto avg_sq = V::fma(V::mul(one_minus_beta2, grad), grad, V::mul(old_avg_sq, beta2));
        V::store(a.exp_avg_sq + i, avg_sq);
        // denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)
        const auto denom = V::add(V::div(V::sqrt(avg_sq), correction), eps);
        // param.addcdiv_(exp_avg, denom, value=-step_size)
        const auto update = V::div(V::mul(negative_step_size, avg), denom);
        Master::template store<V>(a, i, V::add(decayed, update));
    }
    return i;
}

template <class V, class Master, class Grad>
void adamw_range(const AdamwArrays& a, const AdamwScalars& s, std::size_t begin, std::size_t end) {
    const std::size_t rest = adamw_steps<V, Master, Grad>(a, s, begin, end);
    adamw_steps<Scalar, Master, Grad>(a, s, rest, end);
}

template <class V, class Master>
void adamw_with_master(const AdamwArrays& a, const AdamwScalars& s, std::size_t begin, std::size_t end) {
    if (a.grad.fp32 != nullptr) {
        adamw_range<V, Master, Fp32Gradient>(a, s, begin, end);
    } else {
        adamw_range<V, Master, Bf16Gradient>(a, s, begin, end);
    }
}

template <class V>
void adamw(const AdamwArrays& a, const AdamwScalars& s, std::size_t begin, std::size_t end) noexcept {
    if (a.low != nullptr) {
        adamw_with_master<V, SplitMaster>(a, s, begin, end);
    } else if (a.weight != nullptr) {
        adamw_with_master<V, Fp32Master<true>>(a, s, begin, end);
    } else {
        adamw_with_master<V, Fp32Master<false>>(a, s, begin, end);
    }
}

template <class V>
void split_master(const float* master, std::uint16_t* weight, std::uint16_t* low, std::size_t begin,
                  std::size_t end) noexcept {
    std::size_t i = begin;
    for (; i + V::width <= end; i += V::width) split<V>(V::load(master + i), weight + i, low + i);
    for (; i < end; ++i) split<Scalar>(master[i], weight + i, low + i);
}

template <class V>
void join_master(const std::uint16_t* weight, const std::uint16_t* low, float* master, std::size_t begin,
                 std::size_t end) noexcept {
    std::size_t i = begin;
    for (; i + V::width <= end; i += V::width) {
        V::store(master + i, join<V>(V::load_u16(weight + i), V::load_u16(low + i)));
    }
    for (; i < end; ++i) master[i] = join<Scalar>(weight[i], low[i]);
}

template <class V>
void round_bf16(const float* source, std::uint16_t* target, std::size_t begin, std::size_t end) noexcept {
    std::size_t i = begin;
    for (; i + V::width <= end; i += V::width) V::store_u16(target + i, nearest_even<V>(V::load(source + i)));
    for (; i < end; ++i) Scalar::store_u16(target + i, nearest_even<Scalar>(source[i]));
}

// The sum of squares
//
// The square of an fp32 number is exact in fp64, so only the additions round, and their order is fixed:
// sixteen lanes, element i of the range to lane i mod 16, then a tree over the lanes.

template <class V, class Grad, std::size_t k = 0>
void add_sixteen(typename V::Sums& sums, const Gradient& grad, std::size_t i) {
    if constexpr (k * V::width < 16) {
        sums.template add_squares<k>(Grad::template load<V>(grad, i + k * V::width));
        add_sixteen<V, Grad, k + 1>(sums, grad, i);
    }
}

template <class V, class Grad>
double sum_squares_range(const Gradient& grad, std::size_t begin, std::size_t end) {
    typename V::Sums sums;
    std::size_t i = begin;
    for (; i + 16 <= end; i += 16) add_sixteen<V, Grad>(sums, grad, i);
    double lane[16];
    sums.store(lane);
    for (std::size_t k = 0; i < end; ++i, ++k) {
        const double x = Grad::template load<Scalar>(grad, i);
        lane[k] += x * x;
    }
    for (std::size_t half = 8; half > 0; half /= 2) {
        for (std::size_t k = 0; k < half; ++k) lane[k] += lane[k + half];
    }
    return lane[0];
}

template <class V>
double sum_squares(const Gradient& grad, std::size_t begin, std::size_t end) noexcept {
    return grad.fp32 != nullptr ? sum_squares_range<V, Fp32Gradient>(grad, begin, end)
                                : sum_squares_range<V, Bf16Gradient>(grad, begin, end);
}

// Memory bandwidth

// The sum of all elements modulo 2^32, which no compiler can leave out.
template <class V>
std::uint32_t memory_read(const float* source, std::size_t begin, std::size_t end) noexcept {
    constexpr std::size_t chains = 4;  // so that no addition waits for the one before it
    typename V::Bits sums[chains];
    for (auto& sum : sums) sum = V::set_bits(0);
    std::size_t i = begin;
    for (; i + chains * V::width <= end; i += chains * V::width) {
        for (std::size_t k = 0; k < chains; ++k) {
            sums[k] = V::add(sums[k], V::bits(V::load(source + i + k * V::width)));
        }
    }
    float lanes[chains * V::width];
    for (std::size_t k = 0; k < chains; ++k) V::store(lanes + k * V::width, V::from_bits(sums[k]));
    std::uint32_t total = 0;
    for (const float lane : lanes) total += Scalar::bits(lane);
    for (; i < end; ++i) total += Scalar::bits(source[i]);
    return total;
}

template <class V>
typename V::Bits load_element(const Elements& array, std::size_t i) {
    return array.fp32 != nullptr ? V::bits(V::load(array.fp32 + i)) : V::load_u16(array.uint16 + i);
}

void prefetch_element(const Elements& array, std::size_t i) {
    __builtin_prefetch(array.fp32 != nullptr ? static_cast<const void*>(array.fp32 + i) : array.uint16 + i);
}

// Every target becomes source - target modulo its width: as cheap as an update can be, and undone by a second.
template <class V>
std::size_t memory_update_steps(const MemoryStreams& m, std::size_t i, std::size_t end) {
    for (; i + V::width <= end; i += V::width) {
        const auto source = load_element<V>(m.source, i);
        for (std::size_t k = 0; k < m.target_count; ++k) {
            const Elements& target = m.targets[k];
            prefetch_element(target, i + prefetch_ahead);
            const auto difference = V::sub(source, load_element<V>(target, i));
            if (target.fp32 != nullptr) {
                V::store(target.fp32 + i, V::from_bits(difference));
            } else {
                V::store_u16(target.uint16 + i, V::bit_and(difference, V::set_bits(0xffff)));
            }
        }
    }
    return i;
}

template <class V>
void memory_update(const MemoryStreams& m, std::size_t begin, std::size_t end) noexcept {
    const std::size_t rest = memory_update_steps<V>(m, begin, end);
    memory_update_steps<Scalar>(m, rest, end);
}

template <class V>
constexpr Kernels make_kernels(const char* isa, decltype(Kernels::crc32c) crc32c) {
    return {isa,           adamw<V>,       split_master<V>,  join_master<V>, round_bf16<V>,
            sum_squares<V>, memory_read<V>, memory_update<V>, crc32c};
}

}  // namespace
}  // namespace tierstream
