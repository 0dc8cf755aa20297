// Scores of a tile: q.k for a group of queries, several rows at a time so that one transposing sum
// serves kLanes dot products. Needs a Simd; each variant includes it after its own.
#pragma once

#include <cstdint>

#include "kernel_table.h"

namespace herald {
namespace {

constexpr int64_t kPair = 2 * Simd::kLanes;

// Where natural dimension d stands in the variant's lane order: a bf16 pair load splits even and
// odd positions instead of paying for a shuffle.
template <class T>
inline int64_t lane_position(int64_t d) {
  if (sizeof(T) == 4) return d;
  const int64_t within = d % kPair;
  return d - within + (within & 1) * Simd::kLanes + within / 2;
}

// fp32 queries and fp32 products.
template <class T>
struct PlainDot {
  using Key = T;
  using QueryItem = float;
  struct Operand {
    Simd::F a, b;
  };
  static void prepare(const float* query, int64_t dim, int64_t padded, float* prepared) {
    for (int64_t d = 0; d < padded; ++d) prepared[d] = 0;
    for (int64_t d = 0; d < dim; ++d) prepared[lane_position<T>(d)] = query[d];
  }
  static float rounded(float x) { return x; }
  static Operand load_query(const float* q) {
    return {Simd::load(q), Simd::load(q + Simd::kLanes)};
  }
  static Operand load_key(const T* k, bool tail) {
    Operand r;
    Simd::load_pair(k, tail, r.a, r.b);
    return r;
  }
  static Simd::F accumulate(Simd::F sum, const Operand& k, const Operand& q) {
    return Simd::fma(k.a, q.a, Simd::fma(k.b, q.b, sum));
  }
};

struct TileRows {
  const char* row;  // first row of the tile
  int64_t stride;   // bytes from row to row
  int64_t count;    // rows that exist, at least 1
  int64_t dim;
  int64_t prefetch;  // bytes ahead, 0 for none
};

inline void prefetch_rows(const TileRows& t, int64_t first, int64_t rows) {
  const uintptr_t base = reinterpret_cast<uintptr_t>(t.row) + first * t.stride + t.prefetch;
  for (int64_t b = 0; b < rows * t.stride; b += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(base + b));
}

// Scores of Q queries against all rows, written to scores[g * score_stride + row] with the row
// count rounded up to kLanes. Rows past the end repeat the last one: no special arithmetic for
// tails, so a row's score does not depend on where it stands.
template <class Dot, int Q, bool kPrefetch>
inline void score_queries(const TileRows& t, const typename Dot::QueryItem* query,
                          int64_t query_stride, float* scores, int64_t score_stride) {
  constexpr int kRows = Simd::kLanes / Q;
  using Key = typename Dot::Key;
  const int64_t padded = round_up(t.count, Simd::kLanes);
  for (int64_t r0 = 0; r0 < padded; r0 += kRows) {
    if (kPrefetch && t.prefetch) prefetch_rows(t, r0, kRows);
    const Key* key[kRows];
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = r0 + r < t.count ? r0 + r : t.count - 1;
      key[r] = reinterpret_cast<const Key*>(t.row + row * t.stride);
    }
    Simd::F sums[Simd::kLanes];
    for (int i = 0; i < Simd::kLanes; ++i) sums[i] = Simd::set(0);
    for (int64_t d = 0; d < t.dim; d += kPair) {
      const bool tail = d + kPair > t.dim;
      typename Dot::Operand q[Q];
      for (int g = 0; g < Q; ++g) q[g] = Dot::load_query(query + g * query_stride + d);
      for (int r = 0; r < kRows; ++r) {
        const typename Dot::Operand k = Dot::load_key(key[r] + d, tail);
        for (int g = 0; g < Q; ++g)
          sums[g * kRows + r] = Dot::accumulate(sums[g * kRows + r], k, q[g]);
      }
    }
    float lanes[Simd::kLanes];
    Simd::store(lanes, Simd::transpose_sum(sums));
    for (int g = 0; g < Q; ++g)
      __builtin_memcpy(scores + g * score_stride + r0, lanes + g * kRows, kRows * sizeof(float));
  }
}

template <class Dot>
inline void score_tile(const TileRows& t, const typename Dot::QueryItem* query,
                       int64_t query_stride, int64_t group, float* scores, int64_t score_stride) {
  int64_t g = 0;
  const auto step = [&](auto score, int64_t queries) {
    score(t, query + g * query_stride, query_stride, scores + g * score_stride, score_stride);
    g += queries;
  };
  // The first pass over the rows carries the prefetches; the others find the rows in cache.
  if (group >= 4)
    step(score_queries<Dot, 4, true>, 4);
  else if (group >= 2)
    step(score_queries<Dot, 2, true>, 2);
  else
    step(score_queries<Dot, 1, true>, 1);
  while (group - g >= 4) step(score_queries<Dot, 4, false>, 4);
  if (group - g >= 2) step(score_queries<Dot, 2, false>, 2);
  if (group - g >= 1) step(score_queries<Dot, 1, false>, 1);
}

}  // namespace
}  // namespace herald
