// Raw scores of rows: q.k for a set of queries, several rows at a time so that one transposing sum
// serves kLanes dot products. Needs a Simd; each variant includes it after its own.
#pragma once

#include <cstdint>

#include "value-inl.h"

namespace herald {
namespace {

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

template <class Dot>
class RowScorer {
 public:
  using Key = typename Dot::Key;
  using QueryItem = typename Dot::QueryItem;
  using Session = NoSession;

  explicit RowScorer(const ChunkScan& c)
      : c_(c),
        stride_(c.dim * static_cast<int64_t>(sizeof(Key))),
        padded_(round_up(c.dim, kDimPad)) {}

  static int64_t query_bytes(int64_t group, int64_t dim) {
    return group * round_up(dim, kDimPad) * static_cast<int64_t>(sizeof(QueryItem));
  }

  static void prepare(const float* query, int64_t group, int64_t dim, void* prepared) {
    const int64_t padded = round_up(dim, kDimPad);
    auto* to = static_cast<QueryItem*>(prepared);
    for (int64_t g = 0; g < group; ++g) Dot::prepare(query + g * dim, dim, padded, to + g * padded);
  }

  static float single_score(const float* query, const float* key, int64_t dim) {
    float sum = 0;
    for (int64_t d = 0; d < dim; ++d) sum += Dot::rounded(query[d]) * key[d];
    return sum;
  }

  float factor(int64_t) const { return c_.log2_scale; }

  // Calls of step() while a tile is scored.
  static int64_t steps(const ChunkScan& c) {
    const int64_t sets = c.group / 4 + (c.group % 4 >= 2) + (c.group % 4 % 2);
    const int64_t of_four = kTileRows * 4 / Simd::kLanes;
    return c.group >= 4 ? sets * of_four : sets * of_four / 2;
  }

  void score(int64_t row, int64_t count, int64_t first, int64_t queries, float* scores) const {
    const char* rows = static_cast<const char*>(c_.keys) + row * stride_;
    int64_t g = 0;
    const auto each = [&](auto score_set, int64_t set) {
      const auto* query = static_cast<const QueryItem*>(c_.query) + (first + g) * padded_;
      score_set(*this, rows, count, query, scores + g * kTileRows);
      g += set;
    };
    while (queries - g >= 4) each(score_rows<4>, 4);
    if (queries - g >= 2) each(score_rows<2>, 2);
    if (queries - g >= 1) each(score_rows<1>, 1);
  }

  static int64_t value_steps(const ChunkScan& c) { return c.values ? steps_of_values<Key>(c) : 0; }

  void add_values(int64_t row, int64_t count) const { add_tile_values<Key>(c_, row, count); }

 private:
  // Rows past the end repeat the last one: no special arithmetic for tails, so a row's score does
  // not depend on where it stands.
  template <int Q>
  static void score_rows(const RowScorer& s, const char* rows, int64_t count,
                         const QueryItem* query, float* scores) {
    constexpr int kRows = Simd::kLanes / Q;
    const int64_t dim = s.c_.dim;
    for (int64_t r0 = 0; r0 < count; r0 += kRows) {
      step(*s.c_.ahead);
      const Key* key[kRows];
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = r0 + r < count ? r0 + r : count - 1;
        key[r] = reinterpret_cast<const Key*>(rows + row * s.stride_);
      }
      Simd::F sums[Simd::kLanes];
      for (int i = 0; i < Simd::kLanes; ++i) sums[i] = Simd::set(0);
      for (int64_t d = 0; d < dim; d += kPair) {
        const bool tail = d + kPair > dim;
        typename Dot::Operand q[Q];
        for (int g = 0; g < Q; ++g) q[g] = Dot::load_query(query + g * s.padded_ + d);
        for (int r = 0; r < kRows; ++r) {
          const typename Dot::Operand k = Dot::load_key(key[r] + d, tail);
          for (int g = 0; g < Q; ++g)
            sums[g * kRows + r] = Dot::accumulate(sums[g * kRows + r], k, q[g]);
        }
      }
      float lanes[Simd::kLanes];
      Simd::store(lanes, Simd::transpose_sum(sums));
      for (int g = 0; g < Q; ++g)
        __builtin_memcpy(scores + g * kTileRows + r0, lanes + g * kRows, kRows * sizeof(float));
    }
  }

  const ChunkScan& c_;
  const int64_t stride_, padded_;
};

}  // namespace
}  // namespace herald
