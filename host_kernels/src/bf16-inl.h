// Products of bf16 rows by vdpbf16ps. Needs AVX-512, BF16 and score-inl.h.
#pragma once

#include <immintrin.h>

#include "score-inl.h"

namespace herald {
namespace {

// vdpbf16ps: the query is rounded to bf16 too, products and sums are fp32.
struct Bf16Dot {
  using Key = uint16_t;
  using QueryItem = uint16_t;
  using Operand = __m512bh;
  static void prepare(const float* query, int64_t dim, int64_t padded, uint16_t* prepared) {
    for (int64_t d = 0; d < padded; ++d) prepared[d] = 0;
    for (int64_t d = 0; d < dim; ++d) prepared[d] = to_bf16(query[d]);
  }
  static float rounded(float x) {
    const uint32_t bits = static_cast<uint32_t>(to_bf16(x)) << 16;
    float r;
    __builtin_memcpy(&r, &bits, 4);
    return r;
  }
  static Operand load_query(const uint16_t* q) { return (__m512bh)_mm512_loadu_si512(q); }
  static Operand load_key(const uint16_t* k, bool tail) {
    return (__m512bh)Simd::load_words(k, tail);
  }
  static Simd::F accumulate(Simd::F sum, Operand k, Operand q) {
    return _mm512_dpbf16_ps(sum, k, q);
  }

  // Round to nearest even; NaN stays NaN.
  static uint16_t to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

}  // namespace
}  // namespace herald
