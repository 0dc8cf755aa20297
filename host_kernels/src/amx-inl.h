// Scores by tile matrix products (AMX): 16 keys by up to 16 queries at once. Needs AVX-512,
// score-inl.h, index-inl.h and Bf16Dot.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

#include "index-inl.h"
#include "score-inl.h"

namespace herald {
namespace {

constexpr int64_t kTileKeys = 16;

struct TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void shape(int tile, int64_t tile_rows, int64_t row_bytes) {
    // A tile of no rows would be an error to use; it is not used then.
    rows[tile] = static_cast<uint8_t>(tile_rows);
    bytes[tile] = static_cast<uint16_t>(tile_rows ? row_bytes : 0);
  }
};

// The tile registers of a thread while it scans. Leaving them in use would slow the core down.
template <class Scorer>
class TileSession {
 public:
  explicit TileSession(const ChunkScan& c) {
    const TileConfig config = Scorer::config(c);
    // The intrinsic tells the compiler of its first bytes only.
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

// [16 keys][4 queries] -> [query][16 keys].
inline void transpose_four(const float* from, float* to) {
  const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
  const __m512 c = _mm512_loadu_ps(from + 32), d = _mm512_loadu_ps(from + 48);
  const __m512i even = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(2));
  const __m512 ab01 = _mm512_permutex2var_ps(a, even, b), cd01 = _mm512_permutex2var_ps(c, even, d);
  const __m512 ab23 = _mm512_permutex2var_ps(a, odd, b), cd23 = _mm512_permutex2var_ps(c, odd, d);
  _mm512_storeu_ps(to, _mm512_shuffle_f32x4(ab01, cd01, 0x44));
  _mm512_storeu_ps(to + kTileRows, _mm512_shuffle_f32x4(ab01, cd01, 0xee));
  _mm512_storeu_ps(to + 2 * kTileRows, _mm512_shuffle_f32x4(ab23, cd23, 0x44));
  _mm512_storeu_ps(to + 3 * kTileRows, _mm512_shuffle_f32x4(ab23, cd23, 0xee));
}

// [16 keys][16 queries] -> [query][16 keys], the first `queries` of them rounded up to four.
inline void transpose_sixteen(const float* from, int64_t queries, float* to) {
  __m512d pairs[16];
  for (int i = 0; i < 16; i += 2) {
    const __m512 a = _mm512_loadu_ps(from + 16 * i), b = _mm512_loadu_ps(from + 16 * (i + 1));
    pairs[i] = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
    pairs[i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
  }
  // fours[i][j]: keys 4i..4i+3 of queries j, 4 + j, 8 + j, 12 + j.
  __m512 fours[4][4];
  for (int i = 0; i < 4; ++i) {
    const __m512d a = pairs[4 * i], b = pairs[4 * i + 1], c = pairs[4 * i + 2],
                  d = pairs[4 * i + 3];
    fours[i][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    fours[i][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    fours[i][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    fours[i][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 low0 = _mm512_shuffle_f32x4(fours[0][j], fours[1][j], 0x44);
    const __m512 low1 = _mm512_shuffle_f32x4(fours[2][j], fours[3][j], 0x44);
    _mm512_storeu_ps(to + j * kTileRows, _mm512_shuffle_f32x4(low0, low1, 0x88));
    if (queries > 4)
      _mm512_storeu_ps(to + (4 + j) * kTileRows, _mm512_shuffle_f32x4(low0, low1, 0xdd));
    if (queries <= 8) continue;
    const __m512 high0 = _mm512_shuffle_f32x4(fours[0][j], fours[1][j], 0xee);
    const __m512 high1 = _mm512_shuffle_f32x4(fours[2][j], fours[3][j], 0xee);
    _mm512_storeu_ps(to + (8 + j) * kTileRows, _mm512_shuffle_f32x4(high0, high1, 0x88));
    _mm512_storeu_ps(to + (12 + j) * kTileRows, _mm512_shuffle_f32x4(high0, high1, 0xdd));
  }
}

// bf16 rows. Keys are the left operand as they lie in memory; queries are the right one, their
// dimensions in pairs: [set][dim / 2][queries of a set][2], padded with zeros.
class AmxRowScorer {
 public:
  using Session = TileSession<AmxRowScorer>;

  explicit AmxRowScorer(const ChunkScan& c) : c_(c), stride_(2 * c.dim), set_(set_size(c.group)) {}

  static int64_t query_bytes(int64_t group, int64_t dim) {
    return round_up(group, set_size(group)) * dim * 2;
  }

  static void prepare(const float* query, int64_t group, int64_t dim, void* prepared) {
    const int64_t set = set_size(group);
    auto* to = static_cast<uint16_t*>(prepared);
    for (int64_t g = 0; g < round_up(group, set); ++g)
      for (int64_t d = 0; d < dim; ++d)
        to[g / set * set * dim + d / 2 * set * 2 + g % set * 2 + d % 2] =
            g < group ? Bf16Dot::to_bf16(query[g * dim + d]) : uint16_t{0};
  }

  float factor(int64_t) const { return c_.log2_scale; }

  // Calls of step() while a tile is scored.
  static int64_t steps(const ChunkScan& c) {
    return (c.group + kQuerySet - 1) / kQuerySet * (c.dim / 32);
  }

  void score(int64_t row, int64_t count, int64_t first, int64_t queries, float* scores) const {
    const char* rows = static_cast<const char*>(c_.keys) + row * stride_;
    alignas(64) char padded[kTileRows * 2 * kMaxDim];
    if (count < kTileRows) {
      // Nothing beyond the last row may be read.
      __builtin_memcpy(padded, rows, static_cast<size_t>(count * stride_));
      __builtin_memset(padded + count * stride_, 0,
                       static_cast<size_t>((kTileRows - count) * stride_));
      rows = padded;
    }
    const auto* query = static_cast<const char*>(c_.query) + first * stride_;
    const int64_t pair_bytes = 4 * set_, chunk_bytes = kTileKeys * pair_bytes;
    const int64_t whole = c_.dim / 32;
    alignas(64) float products[2 * kTileKeys * kQuerySet];
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < whole; ++i) {
      step(*c_.ahead);
      _tile_loadd(4, query + i * chunk_bytes, static_cast<size_t>(pair_bytes));
      _tile_loadd(2, rows + 64 * i, static_cast<size_t>(stride_));
      _tile_loadd(3, rows + 64 * i + kTileKeys * stride_, static_cast<size_t>(stride_));
      _tile_dpbf16ps(0, 2, 4);
      _tile_dpbf16ps(1, 3, 4);
    }
    if (c_.dim % 32) {
      _tile_loadd(7, query + whole * chunk_bytes, static_cast<size_t>(pair_bytes));
      _tile_loadd(5, rows + 64 * whole, static_cast<size_t>(stride_));
      _tile_loadd(6, rows + 64 * whole + kTileKeys * stride_, static_cast<size_t>(stride_));
      _tile_dpbf16ps(0, 5, 7);
      _tile_dpbf16ps(1, 6, 7);
    }
    const auto row_bytes = static_cast<size_t>(4 * set_);
    _tile_stored(0, products, row_bytes);
    _tile_stored(1, products + kTileKeys * set_, row_bytes);
    for (int half = 0; half < 2; ++half) {
      const float* from = products + half * kTileKeys * set_;
      if (set_ == 4)
        transpose_four(from, scores + half * kTileKeys);
      else
        transpose_sixteen(from, queries, scores + half * kTileKeys);
    }
  }

  static int64_t value_steps(const ChunkScan& c) {
    return c.values ? steps_of_values<uint16_t>(c) : 0;
  }

  void add_values(int64_t row, int64_t count) const { add_tile_values<uint16_t>(c_, row, count); }

  static TileConfig config(const ChunkScan& c) {
    TileConfig t;
    const int64_t pair_bytes = 4 * set_size(c.group), tail = c.dim % 32;
    for (int tile : {0, 1}) t.shape(tile, kTileKeys, pair_bytes);
    for (int tile : {2, 3}) t.shape(tile, kTileKeys, 64);
    t.shape(4, 16, pair_bytes);
    for (int tile : {5, 6}) t.shape(tile, tail ? kTileKeys : 0, 2 * tail);
    t.shape(7, tail / 2, pair_bytes);
    return t;
  }

 private:
  static int64_t set_size(int64_t group) { return group <= 4 ? 4 : kQuerySet; }

  const ChunkScan& c_;
  const int64_t stride_, set_;
};

// A key index. Queries are the left operand, [queries of a set][dim]; keys are the right one as a
// tile is handed out, four dimensions together.
template <class Codes>
class AmxIndexScorer {
 public:
  using Session = TileSession<AmxIndexScorer>;

  explicit AmxIndexScorer(const ChunkScan& c)
      : c_(c),
        known_(static_cast<const IndexQuery*>(c.query)),
        codes_(reinterpret_cast<const int8_t*>(known_ + round_up(c.group, kQuerySet))),
        starts_(reinterpret_cast<const int32_t*>(codes_ + round_up(c.group, kQuerySet) * c.dim)) {}

  static int64_t query_bytes(int64_t group, int64_t dim) {
    return round_up(group, kQuerySet) *
           (static_cast<int64_t>(sizeof(IndexQuery)) + dim + 4 * kTileKeys);
  }

  static void prepare(const float* query, int64_t group, int64_t dim, void* prepared) {
    auto* known = static_cast<IndexQuery*>(prepared);
    auto* codes = reinterpret_cast<int8_t*>(known + round_up(group, kQuerySet));
    for (int64_t g = 0; g < group; ++g)
      round_query<Codes>(query + g * dim, dim, codes + g * dim, known[g]);
    const int64_t rest = round_up(group, kQuerySet) - group;
    __builtin_memset(codes + group * dim, 0, static_cast<size_t>(rest * dim));
    auto* starts = reinterpret_cast<int32_t*>(codes + (group + rest) * dim);
    for (int64_t i = 0; i < (group + rest) * kTileKeys; ++i)
      starts[i] = i / kTileKeys < group ? known[i / kTileKeys].start : 0;
  }

  float factor(int64_t g) const { return c_.log2_scale * known_[g].scale; }

  // Calls of step() while a tile is scored.
  static int64_t steps(const ChunkScan& c) {
    return (c.group + kQuerySet - 1) / kQuerySet * (c.dim / 64);
  }

  void score(int64_t row, int64_t, int64_t first, int64_t queries, float* scores) const {
    constexpr size_t kStride = 4 * kTileRows;
    const int64_t bytes = tile_bytes(Codes::kIndex, c_.dim), whole = c_.dim / 64;
    const char* tile = static_cast<const char*>(c_.keys) + row / kTileRows * bytes;
    alignas(64) uint8_t unpacked[Codes::kUnpacked];
    const uint8_t* keys = Codes::unpack(reinterpret_cast<const uint8_t*>(tile), c_.dim, unpacked);
    const int8_t* codes = codes_ + first * c_.dim;
    const auto query_stride = static_cast<size_t>(c_.dim);
    alignas(64) int32_t products[kQuerySet * kTileRows];
    const int32_t* starts = starts_ + first * kTileKeys;
    _tile_loadd(0, starts, 4 * kTileKeys);
    _tile_loadd(1, starts, 4 * kTileKeys);
    for (int64_t i = 0; i < whole; ++i) {
      step(*c_.ahead);
      _tile_loadd(4, codes + 64 * i, query_stride);
      _tile_loadd(2, keys + 64 * i * kTileRows, kStride);
      _tile_loadd(3, keys + 64 * i * kTileRows + 64, kStride);
      _tile_dpbsud(0, 4, 2);
      _tile_dpbsud(1, 4, 3);
    }
    if (c_.dim % 64) {
      _tile_loadd(7, codes + 64 * whole, query_stride);
      _tile_loadd(5, keys + 64 * whole * kTileRows, kStride);
      _tile_loadd(6, keys + 64 * whole * kTileRows + 64, kStride);
      _tile_dpbsud(0, 7, 5);
      _tile_dpbsud(1, 7, 6);
    }
    _tile_stored(0, products, kStride);
    _tile_stored(1, products + kTileKeys, kStride);
    const auto* scales = reinterpret_cast<const float*>(tile + code_bytes(Codes::kIndex, c_.dim));
    const Simd::F low = Simd::load(scales), high = Simd::load(scales + Simd::kLanes);
    for (int64_t g = 0; g < queries; ++g) {
      const int32_t* from = products + g * kTileRows;
      float* to = scores + g * kTileRows;
      Simd::store(to, Simd::mul(Simd::load_integers(from), low));
      Simd::store(to + Simd::kLanes, Simd::mul(Simd::load_integers(from + Simd::kLanes), high));
    }
  }

  static int64_t value_steps(const ChunkScan&) { return 0; }
  void add_values(int64_t, int64_t) const {}

  static TileConfig config(const ChunkScan& c) {
    TileConfig t;
    const int64_t rows = c.group < kQuerySet ? c.group : kQuerySet, tail = c.dim % 64;
    for (int tile : {0, 1}) t.shape(tile, rows, 64);
    for (int tile : {2, 3}) t.shape(tile, 16, 64);
    t.shape(4, rows, 64);
    for (int tile : {5, 6}) t.shape(tile, tail / 4, 64);
    t.shape(7, tail ? rows : 0, tail);
    return t;
  }

 private:
  const ChunkScan& c_;
  const IndexQuery* known_;
  const int8_t* codes_;
  const int32_t* starts_;  // [queries][kTileKeys], where the products of a query start
};

}  // namespace
}  // namespace herald
