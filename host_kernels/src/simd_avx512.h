// Sixteen lanes of AVX-512. Same interface as simd_scalar.h, which says what each function does.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace herald {
namespace {

struct Simd {
  static constexpr int kLanes = 16;
  static constexpr int kOutputPairs = 2;
  using F = __m512;

  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_integers(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F round(F x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // NaN scaled by 2^-inf would be 0.
  static F scale2(F x, F n) { return _mm512_scalef_ps(x, max(n, set(-150.0f))); }
  static bool all_finite(F x) {
    return _mm512_cmp_ps_mask(_mm512_sub_ps(x, x), _mm512_setzero_ps(), _CMP_EQ_OQ) == 0xffff;
  }
  static F add_at_least(F sum, F x, float floor) {
    return _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(x, set(floor), _CMP_GE_OQ), sum, x);
  }
  static F keep_first(F x, int64_t count) {
    return _mm512_maskz_mov_ps(static_cast<__mmask16>((1u << count) - 1), x);
  }
  static uint32_t greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static uint32_t at_least(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  static bool exceeds(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ) != 0; }
  static void store_chosen(float* p, F x, uint32_t lanes) {
    store(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), x));
  }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }
  static float largest(F x) { return _mm512_reduce_max_ps(x); }
  static F add_pairs(F a, F b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  static F add_quads(F a, F b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  static F add_blocks(F a, F b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  static F transpose_sum(const F (&x)[kLanes]) {
    F four[4];
    for (int i = 0; i < 4; ++i) {
      const F* v = x + 4 * i;
      four[i] = add_quads(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
    }
    return add_blocks(add_blocks(four[0], four[1]), add_blocks(four[2], four[3]));
  }
  static void stream_line(const char* from, char* to) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void end_streams() { _mm_sfence(); }
  // `tail`: only half of the 2 * kLanes values exist; the rest reads as zero.
  static __m512i load_words(const uint16_t* p, bool tail) {
    return tail ? _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))
                : _mm512_loadu_si512(p);
  }
  static void load_pair(const uint16_t* p, bool tail, F& a, F& b) {
    const __m512i words = load_words(p, tail);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(~0xffff)));
  }
  static void load_pair(const float* p, bool tail, F& a, F& b) {
    a = load(p);
    b = tail ? _mm512_setzero_ps() : load(p + kLanes);
  }
};

}  // namespace
}  // namespace herald
