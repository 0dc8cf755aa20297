// One chunk of one KV head: scores, online softmax and attention output in a single pass over K and
// V, tile by tile. Needs a Simd.
//
// A Scorer is made for a chunk and writes raw scores of a tile: score(row, count, first, queries,
// scores) fills scores[g * kTileRows + i] for rows [row, row + count) and queries
// [first, first + queries); factor(g) is what query g's scores are multiplied by. A
// Scorer::Session lives while a thread uses scorers of its kind.
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

inline void begin_chunk(const ChunkScan& c) {
  for (int64_t g = 0; g < c.group; ++g) {
    c.maximum[g] = -__builtin_inff();
    Simd::store(c.lanes + g * kMaxLanes, Simd::set(0));
  }
  if (c.values)
    for (int64_t i = 0; i < c.group * round_up(c.dim, kDimPad); ++i) c.output[i] = 0;
}

template <class Scorer>
bool scan_tile(const ChunkScan& c, const Scorer& scorer, int64_t row) {
  const int64_t padded = round_up(c.dim, kDimPad);
  const int64_t count = c.end - row < kTileRows ? c.end - row : kTileRows;
  alignas(64) float scores[kQuerySet * kTileRows], own[kTileRows];
  for (int64_t first = 0; first < c.group; first += kQuerySet) {
    const int64_t queries = c.group - first < kQuerySet ? c.group - first : kQuerySet;
    scorer.score(row, count, first, queries, scores);
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t g = first + i;
      float* tile = scores + i * kTileRows;
      if (count < kTileRows) pad_scores(tile, count);
      float* weights = c.weights ? c.weights + tile_weights(row / kTileRows, c.group, g) : own;
      float rescale;
      Simd::F sum;
      const auto weigh = count < kTileRows ? weigh_tile<false> : weigh_tile<true>;
      if (!weigh(tile, count, scorer.factor(g), c.maximum[g], rescale, weights, sum)) return false;
      float* lanes = c.lanes + g * kMaxLanes;
      if (rescale != 1) {
        Simd::store(lanes, Simd::mul(Simd::load(lanes), Simd::set(rescale)));
        if (c.values)
          for (int64_t d = 0; d < padded; ++d) c.output[g * padded + d] *= rescale;
      }
      Simd::store(lanes, Simd::add(Simd::load(lanes), sum));
      if (c.weights) c.exponents[row / kTileRows * c.group + g] = c.maximum[g];
      step(*c.ahead);
    }
  }
  if (c.values) scorer.add_values(row, count);
  tile_done(*c.ahead);
  return true;
}

// Chunks are read in turns, a tile of each; every one has a state of its own, so that the turns
// change no result.
template <class Scorer>
bool scan_chunks_with(const ChunkScan* chunks, int64_t count) {
  const typename Scorer::Session session(chunks[0]);
  int64_t longest = 0;
  for (int64_t i = 0; i < count; ++i) {
    begin_chunk(chunks[i]);
    pace_scan(*chunks[i].ahead,
              Scorer::steps(chunks[i]) + chunks[i].group + Scorer::value_steps(chunks[i]));
    const int64_t rows = chunks[i].end - chunks[i].begin;
    longest = rows > longest ? rows : longest;
  }
  for (int64_t at = 0; at < longest; at += kTileRows)
    for (int64_t i = 0; i < count; ++i) {
      const ChunkScan& c = chunks[i];
      if (c.begin + at < c.end && !scan_tile(c, Scorer(c), c.begin + at)) return false;
    }
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= finish_lanes(chunks[i]);
  return finite;
}

template <class Scorer>
void weigh_chunk_with(const ChunkScan& c, const float* maximum, const float* normaliser,
                      float* importance) {
  constexpr int kVectors = kTileRows / Simd::kLanes;
  const typename Scorer::Session session(c);
  const Scorer scorer(c);
  pace_scan(*c.ahead, Scorer::steps(c) + c.group);
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
          sums[v] = add_share(sums[v], w, factor);
        }
        step(*c.ahead);
      }
    }
    for (int v = 0; v < kVectors; ++v) Simd::store(importance + row + v * Simd::kLanes, sums[v]);
  }
}

}  // namespace
}  // namespace herald
