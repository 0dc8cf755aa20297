// One chunk of one KV head: scores, online softmax and attention output in a single pass over K and
// V, tile by tile. Needs a Simd.
//
// A Scorer is made for a chunk and writes raw scores of a tile: score(row, count, first, queries,
// scores) fills scores[g * kTileRows + i] for rows [row, row + count) and queries
// [first, first + queries); factor(g) is what query g's scores are multiplied by.
#pragma once

#include <cstdint>

#include "softmax-inl.h"

namespace herald {
namespace {

// A score of -inf is below every exponent, so it shows in the sums only.
inline bool finish_lanes(const ChunkScan& c) {
  bool finite = true;
  for (int64_t g = 0; g < c.group; ++g) {
    c.normaliser[g] = Simd::sum(Simd::load(c.lanes + g * kMaxLanes));
    finite &= c.normaliser[g] - c.normaliser[g] == 0;
  }
  return finite;
}

template <class Scorer>
bool scan_chunk_with(const ChunkScan& c) {
  Scorer scorer(c);
  const int64_t padded = round_up(c.dim, kDimPad), group = c.group;
  for (int64_t g = 0; g < group; ++g) {
    c.maximum[g] = -__builtin_inff();
    Simd::store(c.lanes + g * kMaxLanes, Simd::set(0));
  }
  if (c.values)
    for (int64_t i = 0; i < group * padded; ++i) c.output[i] = 0;

  alignas(64) float scores[kQuerySet * kTileRows], own[kTileRows];
  for (int64_t row = c.begin; row < c.end; row += kTileRows) {
    const int64_t count = c.end - row < kTileRows ? c.end - row : kTileRows;
    for (int64_t first = 0; first < group; first += kQuerySet) {
      const int64_t queries = group - first < kQuerySet ? group - first : kQuerySet;
      scorer.score(row, count, first, queries, scores);
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t g = first + i;
        float* tile = scores + i * kTileRows;
        if (count < kTileRows) pad_scores(tile, count);
        float* weights = c.weights ? c.weights + g * c.weight_stride + row : own;
        float rescale;
        Simd::F sum;
        if (!weigh_tile(tile, count, scorer.factor(g), c.maximum[g], rescale, weights, sum))
          return false;
        float* lanes = c.lanes + g * kMaxLanes;
        if (rescale != 1) {
          Simd::store(lanes, Simd::mul(Simd::load(lanes), Simd::set(rescale)));
          if (c.values)
            for (int64_t d = 0; d < padded; ++d) c.output[g * padded + d] *= rescale;
        }
        Simd::store(lanes, Simd::add(Simd::load(lanes), sum));
        if (c.weights) c.exponents[row / kTileRows * group + g] = c.maximum[g];
      }
    }
    if (c.values) scorer.add_values(c, row, count);
  }
  return finish_lanes(c);
}

template <class Scorer>
void weigh_chunk_with(const ChunkScan& c, const float* maximum, const float* normaliser,
                      float* importance) {
  constexpr int kVectors = kTileRows / Simd::kLanes;
  Scorer scorer(c);
  alignas(64) float scores[kQuerySet * kTileRows];
  for (int64_t row = c.begin; row < c.end; row += kTileRows) {
    const int64_t count = c.end - row < kTileRows ? c.end - row : kTileRows;
    Simd::F sums[kVectors];
    for (int v = 0; v < kVectors; ++v) sums[v] = Simd::set(0);
    for (int64_t first = 0; first < c.group; first += kQuerySet) {
      const int64_t queries = c.group - first < kQuerySet ? c.group - first : kQuerySet;
      scorer.score(row, count, first, queries, scores);
      for (int64_t i = 0; i < queries; ++i) {
        const int64_t g = first + i;
        float* tile = scores + i * kTileRows;
        if (count < kTileRows) pad_scores(tile, count);
        const Simd::F scale = Simd::set(scorer.factor(g)), exponent = Simd::set(maximum[g]);
        const Simd::F factor = Simd::set(1 / normaliser[g]);
        for (int v = 0; v < kVectors; ++v) {
          Simd::F whole;
          const Simd::F w = weigh(Simd::load(tile + v * Simd::kLanes), scale, exponent, whole);
          sums[v] = Simd::add(sums[v], share(w, factor));
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) Simd::store(importance + row + v * Simd::kLanes, sums[v]);
  }
}

}  // namespace
}  // namespace herald
