#include "simd_avx2.h"
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
    constexpr int kKeys = 4;  // of a vector: four dimensions of each
    for (int64_t key = 0; key < kTileRows; key += 2 * kKeys) {
      __m256i sums[Q][2];
      // The first of the two sums of every key.
      for (int g = 0; g < Q; ++g)
        sums[g][0] = sums[g][1] = _mm256_set1_epi64x(static_cast<uint32_t>(known[g].start));
      for (int64_t d = 0; d < dim; d += 4) {
        const auto* from = reinterpret_cast<const __m128i*>(tile + d * kTileRows + 4 * key);
        const __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128(from));
        const __m256i high = _mm256_cvtepu8_epi16(_mm_loadu_si128(from + 1));
        for (int g = 0; g < Q; ++g) {
          int64_t four;
          __builtin_memcpy(&four, query + g * dim + d, 8);
          const __m256i q = _mm256_set1_epi64x(four);
          sums[g][0] = _mm256_add_epi32(sums[g][0], _mm256_madd_epi16(low, q));
          sums[g][1] = _mm256_add_epi32(sums[g][1], _mm256_madd_epi16(high, q));
        }
      }
      for (int g = 0; g < Q; ++g) {
        // hadd interleaves the 128-bit halves of its operands.
        const __m256i both = _mm256_hadd_epi32(sums[g][0], sums[g][1]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(products + g * kTileRows + key),
                            _mm256_permute4x64_epi64(both, 0xd8));
      }
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
const KernelTable kAvx2Table = make_table("avx2");
}  // namespace herald
