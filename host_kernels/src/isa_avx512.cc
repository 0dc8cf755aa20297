#include "simd_avx512.h"
//
#include "index-inl.h"
#include "score-inl.h"

namespace herald {
namespace {

// Bytes are widened to 16 bits, whose products of pairs fit 32 bits; a key's two sums meet last.
struct WideIndexDot {
  using QueryItem = int16_t;
  template <int Q>
  static void dot(const uint8_t* tile, const int16_t* query, const IndexQuery* known, int64_t dim,
                  int32_t* products) {
    constexpr int kKeys = 8;  // of a vector: four dimensions of each
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int64_t key = 0; key < kTileRows; key += 2 * kKeys) {
      __m512i sums[Q][2];
      // The first of the two sums of every key.
      for (int g = 0; g < Q; ++g)
        sums[g][0] = sums[g][1] = _mm512_set1_epi64(static_cast<uint32_t>(known[g].start));
      for (int64_t d = 0; d < dim; d += 4) {
        const auto* from = reinterpret_cast<const __m256i*>(tile + d * kTileRows + 4 * key);
        const __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from));
        const __m512i high = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from + 1));
        for (int g = 0; g < Q; ++g) {
          int64_t four;
          __builtin_memcpy(&four, query + g * dim + d, 8);
          const __m512i q = _mm512_set1_epi64(four);
          sums[g][0] = _mm512_add_epi32(sums[g][0], _mm512_madd_epi16(low, q));
          sums[g][1] = _mm512_add_epi32(sums[g][1], _mm512_madd_epi16(high, q));
        }
      }
      for (int g = 0; g < Q; ++g)
        _mm512_storeu_si512(
            products + g * kTileRows + key,
            _mm512_add_epi32(_mm512_permutex2var_epi32(sums[g][0], even, sums[g][1]),
                             _mm512_permutex2var_epi32(sums[g][0], odd, sums[g][1])));
    }
  }
};

using Bf16Dot = PlainDot<uint16_t>;
using Bf16Scorer = RowScorer<Bf16Dot>;
template <class Codes>
using CodeScorer = IndexScorer<WideIndexDot, Codes>;

}  // namespace
}  // namespace herald

#include "table-inl.h"

namespace herald {
const KernelTable kAvx512Table = make_table("avx512");
}  // namespace herald
