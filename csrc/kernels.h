// The element-wise kernels and the table through which they are called, one table per instruction set.
//
// Every table gives the same bits for the same input (the payload of a NaN excepted, which IEEE 754 leaves
// open): each kernel is written once, in kernels_impl.h, as a fixed sequence of IEEE operations on a vector
// type; a fused multiply-add is used where the sequence says so and nowhere else (-ffp-contract=off).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstream {

// A gradient in fp32 or bf16 (as its 16 bits); exactly one of the two pointers is set.
struct Gradient {
    const float* fp32 = nullptr;
    const std::uint16_t* bf16 = nullptr;
};

// The planes that one AdamW update reads and writes.
//   split master: weight and low are set, master is null
//   fp32 master:  master is set, weight is the bf16 copy to write or null, low is null
struct AdamwArrays {
    float* master = nullptr;
    std::uint16_t* weight = nullptr;
    std::uint16_t* low = nullptr;
    float* exp_avg = nullptr;
    float* exp_avg_sq = nullptr;
    Gradient grad;
};

// What one AdamW step multiplies, adds and divides by, rounded to fp32 where torch rounds (see
// make_adamw_scalars).
struct AdamwScalars {
    float grad_scale;
    float decay;             // 1 - lr * weight_decay
    float lerp_coefficient;  // 1 - beta1, or -beta1 when the lerp starts from the gradient
    bool lerp_from_grad;     // torch's lerp starts from the nearer end: the gradient when 1 - beta1 >= 0.5
    float beta2;
    float one_minus_beta2;
    float bias_correction2_sqrt;
    float eps;
    float negative_step_size;  // -lr / bias_correction1
};

// An array of 32-bit or 16-bit elements; exactly one of the two pointers is set.
struct Elements {
    float* fp32 = nullptr;
    std::uint16_t* uint16 = nullptr;
};

// What memory_update reads and writes.
struct MemoryStreams {
    const Elements* targets;
    std::size_t target_count;
    Elements source;  // only read
};

// All ranges are element indices [begin, end); pointers need only be aligned to their element.
struct Kernels {
    const char* isa;
    void (*adamw)(const AdamwArrays&, const AdamwScalars&, std::size_t begin, std::size_t end) noexcept;
    void (*split_master)(const float* master, std::uint16_t* weight, std::uint16_t* low, std::size_t begin,
                         std::size_t end) noexcept;
    void (*join_master)(const std::uint16_t* weight, const std::uint16_t* low, float* master,
                        std::size_t begin, std::size_t end) noexcept;
    void (*round_bf16)(const float* source, std::uint16_t* target, std::size_t begin,
                       std::size_t end) noexcept;
    double (*sum_squares)(const Gradient&, std::size_t begin, std::size_t end) noexcept;
    // Two yardsticks: the traffic of a sum and of an update, with next to no arithmetic.
    std::uint32_t (*memory_read)(const float* source, std::size_t begin, std::size_t end) noexcept;
    void (*memory_update)(const MemoryStreams&, std::size_t begin, std::size_t end) noexcept;
    std::uint32_t (*crc32c)(const std::uint8_t* data, std::size_t nbytes, std::uint32_t seed) noexcept;
};

extern const Kernels kernels_scalar;
#if defined(TIERSTREAM_X86_64)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace tierstream
