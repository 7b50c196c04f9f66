// Eight lanes: AVX2 and FMA. The members mean what they mean in simd_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tierstream {
namespace {

struct Avx2 {
    static constexpr std::size_t width = 8;
    using Float = __m256;
    using Bits = __m256i;

    static Float load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
    static Bits load_u16(const std::uint16_t* p) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store_u16(std::uint16_t* p, Bits x) {  // every lane is below 65,536
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0b1000);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }

    static Float set(float x) { return _mm256_set1_ps(x); }
    static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
    static Float sqrt(Float a) { return _mm256_sqrt_ps(a); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }

    static Bits bits(Float x) { return _mm256_castps_si256(x); }
    static Float from_bits(Bits x) { return _mm256_castsi256_ps(x); }
    static Bits set_bits(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static Bits add(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
    static Bits sub(Bits a, Bits b) { return _mm256_sub_epi32(a, b); }
    static Bits bit_and(Bits a, Bits b) { return _mm256_and_si256(a, b); }
    static Bits bit_or(Bits a, Bits b) { return _mm256_or_si256(a, b); }
    template <int n>
    static Bits shift_left(Bits a) {
        return _mm256_slli_epi32(a, n);
    }
    template <int n>
    static Bits shift_right(Bits a) {
        return _mm256_srli_epi32(a, n);
    }
    static Bits if_nan(Float x, Bits yes, Bits no) {
        return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    }

    struct Sums {
        __m256d lane[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                           _mm256_setzero_pd()};
        template <std::size_t k>
        void add_squares(Float x) {
            const __m256d lower = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
            const __m256d upper = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
            lane[2 * k] = _mm256_add_pd(lane[2 * k], _mm256_mul_pd(lower, lower));
            lane[2 * k + 1] = _mm256_add_pd(lane[2 * k + 1], _mm256_mul_pd(upper, upper));
        }
        void store(double* out) const {
            for (std::size_t i = 0; i < 4; ++i) _mm256_storeu_pd(out + 4 * i, lane[i]);
        }
    };
};

}  // namespace
}  // namespace tierstream
