// Eight lanes of AVX2 and FMA. Same interface as simd_scalar.h, which says what each function does.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace herald {
namespace {

struct Simd {
  static constexpr int kLanes = 8;
  static constexpr int kOutputPairs = 1;
  using F = __m256;

  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load_integers(const int32_t* p) {
    return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F scale2(F x, F n) {
    const __m256i exponent = _mm256_cvtps_epi32(_mm256_max_ps(n, _mm256_set1_ps(-127.0f)));
    const __m256i biased = _mm256_add_epi32(exponent, _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  }
  static bool all_finite(F x) {
    const F zero = _mm256_setzero_ps();
    return _mm256_movemask_ps(_mm256_cmp_ps(_mm256_sub_ps(x, x), zero, _CMP_EQ_OQ)) == 0xff;
  }
  static F add_at_least(F sum, F x, float floor) {
    return add(sum, _mm256_and_ps(x, _mm256_cmp_ps(x, _mm256_set1_ps(floor), _CMP_GE_OQ)));
  }
  static F keep_first(F x, int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(count));
    return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, lane)));
  }
  static uint32_t greater(F a, F b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
  }
  static uint32_t at_least(F a, F b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
  }
  static bool exceeds(F a, F b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)) != 0;
  }
  static void store_chosen(float* p, F x, uint32_t lanes) {
    alignas(32) float all[kLanes];
    _mm256_store_ps(all, x);
    for (; lanes; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
  }
  static float sum(F x) {
    const __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
  }
  static float largest(F x) {
    const __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 b = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
  }
  static F add_pairs(F a, F b) {
    return _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
  static F add_quads(F a, F b) {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                         _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  static F transpose_sum(const F (&x)[kLanes]) {
    const F a = add_quads(add_pairs(x[0], x[1]), add_pairs(x[2], x[3]));
    const F b = add_quads(add_pairs(x[4], x[5]), add_pairs(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  }
  static void stream_line(const char* from, char* to) {
    const auto* x = reinterpret_cast<const __m256i*>(from);
    const __m256i low = _mm256_loadu_si256(x), high = _mm256_loadu_si256(x + 1);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, high);
  }
  static void end_streams() { _mm_sfence(); }
  static void load_pair(const uint16_t* p, bool, F& a, F& b) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    a = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(~0xffff)));
  }
  static void load_pair(const float* p, bool, F& a, F& b) {
    a = load(p);
    b = load(p + kLanes);
  }
};

}  // namespace
}  // namespace herald
