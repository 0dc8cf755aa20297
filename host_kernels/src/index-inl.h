// The int8 key index: raw scores of a tile, and rounding keys into it. Needs a Simd.
//
// Keys and queries are codes in -127..127 with a scale each; products are summed as integers, which
// are exact, so scores are the same numbers on every instruction set.
#pragma once

#include <cstdint>

#include "lanes-inl.h"

namespace herald {
namespace {

// What is known of a query beside its codes.
struct IndexQuery {
  float scale;    // of a code
  int32_t start;  // where its products start: less what kCodeOffset adds to them
};

// code = x * (127 / max|x|), rounded half to even. False where a number is not finite.
inline bool quantise(const float* x, int64_t dim, int8_t* codes, float& scale) {
  float largest = 0;
  bool finite = true;
  for (int64_t d = 0; d < dim; ++d) {
    const float size = __builtin_fabsf(x[d]);
    largest = size > largest ? size : largest;
    finite &= x[d] - x[d] == 0;
  }
  const bool zero = !finite || largest < kSmallestKey;
  const float inverse = zero ? 0 : 127 / largest;
  for (int64_t d = 0; d < dim; ++d)
    codes[d] = zero ? 0 : static_cast<int8_t>(__builtin_rintf(x[d] * inverse));
  scale = zero ? 0 : largest / 127;
  return finite;
}

// Codes with one number each, as a Dot reads them.
template <class Dot>
class IndexScorer {
 public:
  using Item = typename Dot::QueryItem;
  using Session = NoSession;

  explicit IndexScorer(const ChunkScan& c)
      : c_(c),
        known_(static_cast<const IndexQuery*>(c.query)),
        codes_(reinterpret_cast<const Item*>(known_ + round_up(c.group, 8))) {}

  static int64_t query_bytes(int64_t group, int64_t dim) {
    return round_up(group, 8) * static_cast<int64_t>(sizeof(IndexQuery)) +
           group * dim * static_cast<int64_t>(sizeof(Item));
  }

  static void prepare(const float* query, int64_t group, int64_t dim, void* prepared) {
    auto* known = static_cast<IndexQuery*>(prepared);
    auto* codes = reinterpret_cast<Item*>(known + round_up(group, 8));
    alignas(64) int8_t own[kMaxDim];
    for (int64_t g = 0; g < group; ++g) {
      if (!quantise(query + g * dim, dim, own, known[g].scale)) known[g].scale = __builtin_nanf("");
      int32_t sum = 0;
      for (int64_t d = 0; d < dim; ++d) {
        sum += own[d];
        codes[g * dim + d] = own[d];
      }
      known[g].start = -kCodeOffset * sum;
    }
  }

  float factor(int64_t g) const { return c_.log2_scale * known_[g].scale; }

  // Calls of step() while a tile is scored.
  static int64_t steps(const ChunkScan& c) {
    return c.group / 4 + (c.group % 4 >= 2) + (c.group % 4 % 2);
  }

  void score(int64_t row, int64_t, int64_t first, int64_t queries, float* scores) const {
    const int64_t bytes = tile_bytes(c_.dim);
    const char* tile = static_cast<const char*>(c_.keys) + row / kTileRows * bytes;
    alignas(64) int32_t products[4 * kTileRows];
    const auto* scales = reinterpret_cast<const float*>(tile + kTileRows * c_.dim);
    int64_t g = 0;
    const auto each = [&](auto dot, int64_t set) {
      step(*c_.ahead);
      dot(reinterpret_cast<const uint8_t*>(tile), codes_ + (first + g) * c_.dim, known_ + first + g,
          c_.dim, products);
      for (int64_t i = 0; i < set; ++i, ++g)
        for (int64_t r = 0; r < kTileRows; r += Simd::kLanes)
          Simd::store(
              scores + g * kTileRows + r,
              Simd::mul(Simd::load_integers(products + i * kTileRows + r), Simd::load(scales + r)));
    };
    while (queries - g >= 4) each(Dot::template dot<4>, 4);
    if (queries - g >= 2) each(Dot::template dot<2>, 2);
    if (queries - g >= 1) each(Dot::template dot<1>, 1);
  }

  // An index has no values.
  static int64_t value_steps(const ChunkScan&) { return 0; }
  void add_values(int64_t, int64_t) const {}

 private:
  const ChunkScan& c_;
  const IndexQuery* known_;
  const Item* codes_;
};

// Plain loops; also what the vectorised ones must equal.
struct PlainIndexDot {
  using QueryItem = int8_t;
  template <int Q>
  static void dot(const uint8_t* tile, const int8_t* query, const IndexQuery* known, int64_t dim,
                  int32_t* products) {
    for (int i = 0; i < Q * kTileRows; ++i) products[i] = known[i / kTileRows].start;
    for (int g = 0; g < Q; ++g)
      for (int64_t d = 0; d < dim; d += 4)
        for (int64_t r = 0; r < kTileRows; ++r) {
          const uint8_t* key = tile + d * kTileRows + 4 * r;
          const int8_t* q = query + g * dim + d;
          products[g * kTileRows + r] +=
              key[0] * q[0] + key[1] * q[1] + key[2] * q[2] + key[3] * q[3];
        }
  }
};

template <class T>
void index_rows_of(const T* keys, int64_t first, int64_t count, int64_t dim, char* tiles) {
  alignas(64) float key[kMaxDim];
  alignas(64) int8_t codes[kMaxDim];
  for (int64_t row = first; row < first + count; ++row) {
    const T* from = keys + row * dim;
    if constexpr (sizeof(T) == 2) {
      for (int64_t d = 0; d < dim; ++d) {
        const uint32_t bits = static_cast<uint32_t>(from[d]) << 16;
        __builtin_memcpy(key + d, &bits, 4);
      }
    } else {
      __builtin_memcpy(key, from, static_cast<size_t>(dim) * 4);
    }
    float scale;
    if (!quantise(key, dim, codes, scale)) scale = __builtin_nanf("");
    char* tile = tiles + row / kTileRows * tile_bytes(dim);
    const int64_t at = row % kTileRows;
    for (int64_t d = 0; d < dim; d += 4) {
      uint32_t four;
      __builtin_memcpy(&four, codes + d, 4);
      four ^= 0x80808080u;  // plus kCodeOffset
      __builtin_memcpy(tile + d * kTileRows + 4 * at, &four, 4);
    }
    __builtin_memcpy(tile + kTileRows * dim + 4 * at, &scale, 4);
  }
}

inline void index_rows(DType dtype, const void* keys, int64_t first, int64_t count, int64_t dim,
                       char* tiles) {
  if (dtype == DType::kBFloat16)
    index_rows_of(static_cast<const uint16_t*>(keys), first, count, dim, tiles);
  else
    index_rows_of(static_cast<const float*>(keys), first, count, dim, tiles);
}

}  // namespace
}  // namespace herald
