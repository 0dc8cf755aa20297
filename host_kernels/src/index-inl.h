// The key indexes: raw scores of a tile, and rounding keys into it. Needs a Simd.
//
// Keys and queries are integer codes with a scale each; products are summed as integers, which are
// exact, so scores are the same numbers on every instruction set. Queries always have codes in
// -127..127; how keys are rounded and lie in a tile is told by Codes, which hands out a tile as
// unsigned bytes [dim / 4][32 keys][4] whatever it stores.
#pragma once

#include <cstdint>

#include "lanes-inl.h"

namespace herald {
namespace {

constexpr int kQueryMost = 127;

// What is known of a query beside its codes.
struct IndexQuery {
  float scale;    // of a code
  int32_t start;  // where its products start: less what Codes::kOffset adds to them
};

// code = x * (most / max|x|), rounded half to even. False where a number is not finite.
inline bool quantise(const float* x, int64_t dim, int most, int8_t* codes, float& scale) {
  float largest = 0;
  bool finite = true;
  for (int64_t d = 0; d < dim; ++d) {
    const float size = __builtin_fabsf(x[d]);
    largest = size > largest ? size : largest;
    finite &= x[d] - x[d] == 0;
  }
  const bool zero = !finite || largest < kSmallestKey;
  const auto range = static_cast<float>(most);
  const float inverse = zero ? 0 : range / largest;
  for (int64_t d = 0; d < dim; ++d)
    codes[d] = zero ? 0 : static_cast<int8_t>(__builtin_rintf(x[d] * inverse));
  scale = zero ? 0 : largest / range;
  return finite;
}

// A byte a code, as it is.
struct Int8Codes {
  static constexpr DType kIndex = DType::kInt8Index;
  static constexpr int kMost = 127;
  // Added to a stored code, because the fastest dot products want unsigned bytes.
  static constexpr int kOffset = 128;
  // Bytes that unpack() needs to write to.
  static constexpr int64_t kUnpacked = 1;

  static const float* turned(const float* x, int64_t, float*) { return x; }
  static float key_factor(int64_t) { return 1; }

  static void put(const int8_t* codes, int64_t dim, int64_t at, char* tile) {
    for (int64_t d = 0; d < dim; d += 4) {
      uint32_t four;
      __builtin_memcpy(&four, codes + d, 4);
      four ^= 0x80808080u;  // plus kOffset
      __builtin_memcpy(tile + d * kTileRows + 4 * at, &four, 4);
    }
  }

  static const uint8_t* unpack(const uint8_t* tile, int64_t, uint8_t*) { return tile; }
};

// Two codes a byte. Keys and queries are rotated before they are rounded, which spreads what is
// large in a few dimensions over all of them and changes no product of a key and a query.
struct Int4Codes {
  static constexpr DType kIndex = DType::kInt4Index;
  static constexpr int kMost = 7, kOffset = 8;
  static constexpr int64_t kUnpacked = kTileRows * kMaxDim;

  // Dimensions that are rotated together: the largest power of two that divides them all.
  static int64_t width(int64_t dim) { return dim & -dim; }

  // Walsh-Hadamard, not normalised: sums and differences of neighbours, log2(width) times. All of
  // it is additions in one order, so every instruction set finds the same bits.
  static const float* turned(const float* x, int64_t dim, float* to) {
    alignas(64) float other[kMaxDim];
    const int64_t group = width(dim), half = group / 2;
    __builtin_memcpy(to, x, static_cast<size_t>(dim) * 4);
    for (int64_t at = 0; at < dim; at += group)
      for (int64_t stage = 1; stage < group; stage *= 2) {
        float* now = to + at;
        for (int64_t i = 0; i < half; ++i) {
          other[i] = now[2 * i] + now[2 * i + 1];
          other[half + i] = now[2 * i] - now[2 * i + 1];
        }
        __builtin_memcpy(now, other, static_cast<size_t>(group) * 4);
      }
    return to;
  }

  // Products of vectors that were turned are this many times too large; a power of two.
  static float key_factor(int64_t dim) { return 1 / static_cast<float>(width(dim)); }

  static void put(const int8_t* codes, int64_t dim, int64_t at, char* tile) {
    for (int64_t d = 0; d < dim; d += 8) {
      uint32_t low, high;
      __builtin_memcpy(&low, codes + d, 4);
      __builtin_memcpy(&high, codes + d + 4, 4);
      // Four bits with the sign turned are the code plus kOffset.
      low = (low & 0x0f0f0f0fu) ^ 0x08080808u;
      high = (high & 0x0f0f0f0fu) ^ 0x08080808u;
      low |= high << 4;
      __builtin_memcpy(tile + d / 2 * kTileRows + 4 * at, &low, 4);
    }
  }

  static const uint8_t* unpack(const uint8_t* tile, int64_t dim, uint8_t* to) {
    constexpr int64_t kFour = 4 * kTileRows;  // bytes of four dimensions of a tile
    for (int64_t d = 0; d < dim; d += 8, tile += kFour, to += 2 * kFour)
      for (int64_t i = 0; i < kFour; ++i) {
        to[i] = tile[i] & 15;
        to[kFour + i] = tile[i] >> 4;
      }
    return to - 2 * kFour * (dim / 8);
  }
};

// Codes and what is known of a query: `codes` [dim].
template <class Codes>
void round_query(const float* query, int64_t dim, int8_t* codes, IndexQuery& known) {
  alignas(64) float own[kMaxDim];
  if (!quantise(Codes::turned(query, dim, own), dim, kQueryMost, codes, known.scale))
    known.scale = __builtin_nanf("");
  int32_t sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += codes[d];
  known.start = -Codes::kOffset * sum;
}

// Codes with one number each, as a Dot reads them.
template <class Dot, class Codes>
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
      round_query<Codes>(query + g * dim, dim, own, known[g]);
      for (int64_t d = 0; d < dim; ++d) codes[g * dim + d] = own[d];
    }
  }

  float factor(int64_t g) const { return c_.log2_scale * known_[g].scale; }

  // Calls of step() while a tile is scored.
  static int64_t steps(const ChunkScan& c) {
    return c.group / 4 + (c.group % 4 >= 2) + (c.group % 4 % 2);
  }

  void score(int64_t row, int64_t, int64_t first, int64_t queries, float* scores) const {
    const int64_t bytes = tile_bytes(Codes::kIndex, c_.dim);
    const char* tile = static_cast<const char*>(c_.keys) + row / kTileRows * bytes;
    alignas(64) uint8_t unpacked[Codes::kUnpacked];
    alignas(64) int32_t products[4 * kTileRows];
    const uint8_t* keys = Codes::unpack(reinterpret_cast<const uint8_t*>(tile), c_.dim, unpacked);
    const auto* scales = reinterpret_cast<const float*>(tile + code_bytes(Codes::kIndex, c_.dim));
    int64_t g = 0;
    const auto each = [&](auto dot, int64_t set) {
      step(*c_.ahead);
      dot(keys, codes_ + (first + g) * c_.dim, known_ + first + g, c_.dim, products);
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

template <class Codes, class T>
void index_rows_of(const T* keys, int64_t first, int64_t count, int64_t dim, char* tiles) {
  alignas(64) float key[kMaxDim], own[kMaxDim];
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
    if (quantise(Codes::turned(key, dim, own), dim, Codes::kMost, codes, scale))
      scale *= Codes::key_factor(dim);
    else
      scale = __builtin_nanf("");
    char* tile = tiles + row / kTileRows * tile_bytes(Codes::kIndex, dim);
    const int64_t at = row % kTileRows;
    Codes::put(codes, dim, at, tile);
    __builtin_memcpy(tile + code_bytes(Codes::kIndex, dim) + 4 * at, &scale, 4);
  }
}

template <class Codes>
void index_rows_as(DType dtype, const void* keys, int64_t first, int64_t count, int64_t dim,
                   char* tiles) {
  if (dtype == DType::kBFloat16)
    index_rows_of<Codes>(static_cast<const uint16_t*>(keys), first, count, dim, tiles);
  else
    index_rows_of<Codes>(static_cast<const float*>(keys), first, count, dim, tiles);
}

inline void index_rows(DType dtype, DType index, const void* keys, int64_t first, int64_t count,
                       int64_t dim, char* tiles) {
  if (index == DType::kInt8Index)
    index_rows_as<Int8Codes>(dtype, keys, first, count, dim, tiles);
  else
    index_rows_as<Int4Codes>(dtype, keys, first, count, dim, tiles);
}

}  // namespace
}  // namespace herald
