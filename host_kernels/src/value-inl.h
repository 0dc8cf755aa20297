// The attention output of a tile: weights times V. Needs a Simd.
#pragma once

#include <cstdint>

#include "lanes-inl.h"

namespace herald {
namespace {

// output[g] += sum over rows of a tile of weights[g][row] * V[row], for Q queries and P pairs of
// vectors.
template <class T, int Q, int P>
inline void add_values(const char* values, int64_t stride, int64_t rows, bool tail,
                       const float* weights, float* output, int64_t output_stride, Ahead& ahead) {
  Simd::F sums[Q][2 * P];
  for (int g = 0; g < Q; ++g)
    for (int i = 0; i < 2 * P; ++i)
      sums[g][i] = Simd::load(output + g * output_stride + i * Simd::kLanes);
  for (int64_t r = 0; r < rows; ++r) {
    const T* v = reinterpret_cast<const T*>(values + r * stride);
    step(ahead);
    Simd::F value[2 * P];
    for (int i = 0; i < P; ++i)
      Simd::load_pair(v + i * kPair, tail && i == P - 1, value[2 * i], value[2 * i + 1]);
    for (int g = 0; g < Q; ++g) {
      const Simd::F w = Simd::set(weights[g * kTileRows + r]);
      for (int i = 0; i < 2 * P; ++i) sums[g][i] = Simd::fma(w, value[i], sums[g][i]);
    }
  }
  for (int g = 0; g < Q; ++g)
    for (int i = 0; i < 2 * P; ++i)
      Simd::store(output + g * output_stride + i * Simd::kLanes, sums[g][i]);
}

template <class T, int Q>
inline void add_values_of(const char* values, int64_t stride, int64_t rows, int64_t dim,
                          const float* weights, float* output, int64_t output_stride,
                          Ahead& ahead) {
  constexpr int P = Simd::kOutputPairs;
  int64_t d = 0;
  for (; P > 1 && d + (P - 1) * kPair < dim; d += P * kPair)
    add_values<T, Q, P>(values + d * sizeof(T), stride, rows, d + P * kPair > dim, weights,
                        output + d, output_stride, ahead);
  for (; d < dim; d += kPair)
    add_values<T, Q, 1>(values + d * sizeof(T), stride, rows, d + kPair > dim, weights, output + d,
                        output_stride, ahead);
}

// Calls of step() while the values of a tile are added.
template <class T>
inline int64_t steps_of_values(const ChunkScan& c) {
  const int64_t sets = c.group / 4 + (c.group % 4 >= 2) + (c.group % 4 % 2);
  return sets * kTileRows * ((c.dim + kPair - 1) / kPair) / Simd::kOutputPairs;
}

// Adds rows [row, row + count) of V to the output of every query.
template <class T>
inline void add_tile_values(const ChunkScan& c, int64_t row, int64_t count) {
  const int64_t padded = round_up(c.dim, kDimPad);
  const int64_t stride = c.dim * static_cast<int64_t>(sizeof(T));
  const char* values = static_cast<const char*>(c.values) + row * stride;
  int64_t g = 0;
  const auto each = [&](auto add, int64_t queries) {
    add(values, stride, count, c.dim, c.weights + tile_weights(row / kTileRows, c.group, g),
        c.output + g * padded, padded, *c.ahead);
    g += queries;
  };
  while (c.group - g >= 4) each(add_values_of<T, 4>, 4);
  if (c.group - g >= 2) each(add_values_of<T, 2>, 2);
  if (c.group - g >= 1) each(add_values_of<T, 1>, 1);
}

}  // namespace
}  // namespace herald
