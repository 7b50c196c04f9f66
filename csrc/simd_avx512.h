// Sixteen lanes: AVX-512 F, BW, DQ and VL. The members mean what they mean in simd_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tierstream {
namespace {

struct Avx512 {
    static constexpr std::size_t width = 16;
    using Float = __m512;
    using Bits = __m512i;

    static Float load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
    static Bits load_u16(const std::uint16_t* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void store_u16(std::uint16_t* p, Bits x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
    }

    static Float set(float x) { return _mm512_set1_ps(x); }
    static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
    static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }

    static Bits bits(Float x) { return _mm512_castps_si512(x); }
    static Float from_bits(Bits x) { return _mm512_castsi512_ps(x); }
    static Bits set_bits(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static Bits add(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
    static Bits sub(Bits a, Bits b) { return _mm512_sub_epi32(a, b); }
    static Bits bit_and(Bits a, Bits b) { return _mm512_and_si512(a, b); }
    static Bits bit_or(Bits a, Bits b) { return _mm512_or_si512(a, b); }
    template <int n>
    static Bits shift_left(Bits a) {
        return _mm512_slli_epi32(a, n);
    }
    template <int n>
    static Bits shift_right(Bits a) {
        return _mm512_srli_epi32(a, n);
    }
    static Bits if_nan(Float x, Bits yes, Bits no) {
        return _mm512_mask_mov_epi32(no, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), yes);
    }

    struct Sums {
        __m512d lane[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
        template <std::size_t k>
        void add_squares(Float x) {
            static_assert(k == 0);
            const __m512d lower = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
            const __m512d upper = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
            lane[0] = _mm512_add_pd(lane[0], _mm512_mul_pd(lower, lower));
            lane[1] = _mm512_add_pd(lane[1], _mm512_mul_pd(upper, upper));
        }
        void store(double* out) const {
            _mm512_storeu_pd(out, lane[0]);
            _mm512_storeu_pd(out + 8, lane[1]);
        }
    };
};

}  // namespace
}  // namespace tierstream
