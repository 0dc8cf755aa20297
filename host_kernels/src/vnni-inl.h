// Index scores by vpdpbusd: four dimensions of 16 keys at once. Needs AVX-512, VNNI and
// index-inl.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "index-inl.h"

namespace herald {
namespace {

struct VnniIndexDot {
  using QueryItem = int8_t;
  template <int Q>
  static void dot(const uint8_t* tile, const int8_t* query, const IndexQuery* known, int64_t dim,
                  int32_t* products) {
    __m512i sums[Q][2];
    for (int g = 0; g < Q; ++g) sums[g][0] = sums[g][1] = _mm512_set1_epi32(known[g].start);
    for (int64_t d = 0; d < dim; d += 4) {
      const __m512i low = _mm512_loadu_si512(tile + d * kTileRows);
      const __m512i high = _mm512_loadu_si512(tile + d * kTileRows + 64);
      for (int g = 0; g < Q; ++g) {
        int32_t four;
        __builtin_memcpy(&four, query + g * dim + d, 4);
        const __m512i q = _mm512_set1_epi32(four);
        sums[g][0] = _mm512_dpbusd_epi32(sums[g][0], low, q);
        sums[g][1] = _mm512_dpbusd_epi32(sums[g][1], high, q);
      }
    }
    for (int g = 0; g < Q; ++g) {
      _mm512_storeu_si512(products + g * kTileRows, sums[g][0]);
      _mm512_storeu_si512(products + g * kTileRows + 16, sums[g][1]);
    }
  }
};

}  // namespace
}  // namespace herald
