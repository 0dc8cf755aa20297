// Importance of every row of a head and its exact top-k: a radix selection by histograms of the
// float bits, no heap and no sort. Needs a Simd and softmax-inl.h.
#pragma once

#include <cstdint>

#include "softmax-inl.h"

namespace herald {
namespace {

// Lines to ask for with every tile of each of the three passes: what memory delivers meanwhile.
constexpr int64_t kSelectStep = 4;
// From so many rows on, a sample of every so manieth one pays.
constexpr int64_t kSampledRows = 2048, kSampleStride = 31;

inline uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// importance[row] = sum over the group of weight / normaliser (paper, section IV-B4).
inline void compute_importance(const HeadSelect& h) {
  constexpr int kVectors = kTileRows / Simd::kLanes;
  // An exponent seldom changes from tile to tile, so its factor is kept.
  float seen[kQuerySet], factors[kQuerySet];
  for (float& exponent : seen) exponent = __builtin_nanf("");
  for (int64_t row = 0; row < h.select_len; row += kTileRows) {
    const float* exponents = h.exponents + row / kTileRows * h.group;
    const float* weights = h.weights + tile_weights(row / kTileRows, h.group, 0);
    Simd::F sums[kVectors];
    for (int i = 0; i < kVectors; ++i) sums[i] = Simd::set(0);
    for (int64_t g = 0; g < h.group; ++g) {
      const int64_t at = g % kQuerySet;
      if (h.group > kQuerySet || exponents[g] != seen[at]) {
        seen[at] = exponents[g];
        factors[at] = exp2_integer(exponents[g] - h.maximum[g]) / h.normaliser[g];
      }
      const Simd::F factor = Simd::set(factors[at]);
      for (int i = 0; i < kVectors; ++i) {
        const Simd::F w = Simd::load(weights + g * kTileRows + i * Simd::kLanes);
        sums[i] = add_share(sums[i], w, factor);
      }
    }
    for (int i = 0; i < kVectors; ++i) Simd::store(h.importance + row + i * Simd::kLanes, sums[i]);
    step(*h.ahead);
  }
}

// Sinks and recent rows outrank everything; padding is outranked by everything.
inline void force_rows(const HeadSelect& h) {
  const int64_t sinks = h.sinks < h.budget ? h.sinks : h.budget, room = h.budget - sinks;
  const int64_t recent = h.recent < room ? h.recent : room;
  for (int64_t row = 0; row < sinks; ++row) h.importance[row] = 0x1p127f;
  for (int64_t row = h.select_len - recent; row < h.select_len; ++row) h.importance[row] = 0x1p127f;
  for (int64_t row = h.select_len; row % kTileRows; ++row) h.importance[row] = -1;
}

// The bin, from the top, in which the `need`-th largest lies; `need` becomes its rank inside it.
inline int64_t find_bin(const uint32_t* histogram, int64_t bins, int64_t& need) {
  int64_t bin = bins - 1;
  while (histogram[bin] < static_cast<uint64_t>(need)) need -= histogram[bin--];
  return bin;
}

template <class Emit>
inline void for_each_bit(uint32_t mask, Emit emit) {
  for (; mask; mask &= mask - 1) emit(__builtin_ctz(mask));
}

inline uint32_t histogram_bin(float x) { return float_bits(x) >> 19; }

// The bits of the rows that may be among the `need` largest, in h.candidates; returns how many. A
// sample tells roughly where the threshold lies. Should it mislead, all rows are candidates, so the
// result never depends on it.
inline int64_t list_candidates(const HeadSelect& h, int64_t need) {
  const int64_t n = h.select_len;
  float floor = 0;
  if (n >= kSampledRows) {
    __builtin_memset(h.histogram, 0, sizeof(uint32_t) * kHistogramBins);
    int64_t sampled = 0;
    for (int64_t i = 0; i < n; i += kSampleStride, ++sampled)
      ++h.histogram[histogram_bin(h.importance[i])];
    // Twice as many as needed and a few more, for a sample may be unlucky.
    int64_t rank = 2 * need * sampled / n + 16;
    if (rank > sampled) rank = sampled;
    floor = bits_float(static_cast<uint32_t>(find_bin(h.histogram, kHistogramBins, rank)) << 19);
  }
  for (;;) {
    const Simd::F least = Simd::set(floor);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += Simd::kLanes) {
      if (i % kTileRows == 0) step(*h.ahead);
      const Simd::F x = Simd::load(h.importance + i);
      const uint32_t mask = Simd::at_least(x, least);
      Simd::store_chosen(reinterpret_cast<float*>(h.candidates + count), x, mask);
      count += __builtin_popcount(mask);
    }
    if (count >= need) return count;
    floor = 0;
  }
}

inline bool all_equal(const uint32_t* bits, int64_t count) {
  uint32_t different = 0;
  for (int64_t i = 0; i < count; ++i) different |= bits[i] ^ bits[0];
  return different == 0;
}

// Exact value of the `need`-th largest of importance[0, n); `need` becomes how many rows of exactly
// that value belong to the selection. Bits are taken 12, 11 and 8 at a time from the top.
inline float find_threshold(const HeadSelect& h, int64_t& need) {
  int64_t count = list_candidates(h, need);
  // Many equal rows would count one after the other in one bin.
  if (all_equal(h.candidates, count)) return bits_float(h.candidates[0]);
  uint32_t* histogram = h.histogram;
  const int64_t tables = count >= kHistogramBins ? kHistogramTables : 1;
  __builtin_memset(histogram, 0, sizeof(uint32_t) * tables * kHistogramBins);
  // Neighbouring rows often share a bin; several tables keep their increments independent.
  const int64_t table_mask = tables - 1;
  for (int64_t i = 0; i < count; ++i)
    ++histogram[(i & table_mask) * kHistogramBins + (h.candidates[i] >> 19)];
  for (int64_t t = 1; t < tables; ++t)
    for (int64_t b = 0; b < kHistogramBins; ++b) histogram[b] += histogram[t * kHistogramBins + b];
  const uint32_t top = static_cast<uint32_t>(find_bin(histogram, kHistogramBins, need));
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    h.candidates[kept] = h.candidates[i];
    kept += h.candidates[i] >> 19 == top;
  }
  if (all_equal(h.candidates, kept)) return bits_float(h.candidates[0]);
  __builtin_memset(histogram, 0, sizeof(uint32_t) * 2048);
  for (int64_t i = 0; i < kept; ++i) ++histogram[(h.candidates[i] >> 8) & 0x7ff];
  const uint32_t middle = (top << 11) | static_cast<uint32_t>(find_bin(histogram, 2048, need));
  __builtin_memset(histogram, 0, sizeof(uint32_t) * 256);
  for (int64_t i = 0; i < kept; ++i)
    if (h.candidates[i] >> 8 == middle) ++histogram[h.candidates[i] & 0xff];
  return bits_float((middle << 8) | static_cast<uint32_t>(find_bin(histogram, 256, need)));
}

void select_head(const HeadSelect& h) {
  if (h.budget == 0) return;
  if (h.budget == h.select_len) {
    for (int64_t i = 0; i < h.select_len; ++i) h.indices[i] = static_cast<int32_t>(i);
    return;
  }
  pace_other(*h.ahead, kSelectStep);
  if (h.weights) compute_importance(h);
  force_rows(h);
  int64_t ties = h.budget, count = 0;
  const float value = find_threshold(h, ties);
  const Simd::F threshold = Simd::set(value);
  for (int64_t i = 0; i < h.select_len; i += Simd::kLanes) {
    if (i % kTileRows == 0) step(*h.ahead);
    const Simd::F x = Simd::load(h.importance + i);
    const uint32_t above = Simd::greater(x, threshold);
    const uint32_t chosen = ties > 0 ? Simd::at_least(x, threshold) : above;
    for_each_bit(chosen, [&](int lane) {
      if (!(above >> lane & 1) && ties-- <= 0) return;
      h.indices[count++] = static_cast<int32_t>(i + lane);
    });
  }
}

}  // namespace
}  // namespace herald
