// The vector type of width one: plain C++, for any CPU, and for the last few elements of every other width.
//
// The simd_*.h headers hold everything in an unnamed namespace: each is compiled into translation units with
// different machine flags, and a function shared between them could carry AVX-512 code into the path of a CPU
// without it.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace tierstream {
namespace {

struct Scalar {
    static constexpr std::size_t width = 1;
    using Float = float;
    using Bits = std::uint32_t;

    static Float load(const float* p) { return *p; }
    static void store(float* p, Float x) { *p = x; }
    static Bits load_u16(const std::uint16_t* p) { return *p; }
    static void store_u16(std::uint16_t* p, Bits x) { *p = static_cast<std::uint16_t>(x); }

    static Float set(float x) { return x; }
    static Float add(Float a, Float b) { return a + b; }
    static Float sub(Float a, Float b) { return a - b; }
    static Float mul(Float a, Float b) { return a * b; }
    static Float div(Float a, Float b) { return a / b; }
    static Float sqrt(Float a) { return std::sqrt(a); }
    static Float fma(Float a, Float b, Float c) { return std::fma(a, b, c); }

    static Bits bits(Float x) { return std::bit_cast<Bits>(x); }
    static Float from_bits(Bits x) { return std::bit_cast<Float>(x); }
    static Bits set_bits(std::uint32_t x) { return x; }
    static Bits add(Bits a, Bits b) { return a + b; }
    static Bits sub(Bits a, Bits b) { return a - b; }
    static Bits bit_and(Bits a, Bits b) { return a & b; }
    static Bits bit_or(Bits a, Bits b) { return a | b; }
    template <int n>
    static Bits shift_left(Bits a) {
        return a << n;
    }
    template <int n>
    static Bits shift_right(Bits a) {
        return a >> n;
    }
    static Bits if_nan(Float x, Bits yes, Bits no) { return x != x ? yes : no; }

    // Sixteen running fp64 sums; add<k>(x) adds the squares of x to lanes [k * width, (k + 1) * width).
    struct Sums {
        double lane[16] = {};
        template <std::size_t k>
        void add_squares(Float x) {
            lane[k] += static_cast<double>(x) * static_cast<double>(x);
        }
        void store(double* out) const {
            for (std::size_t i = 0; i < 16; ++i) out[i] = lane[i];
        }
    };
};

}  // namespace
}  // namespace tierstream
