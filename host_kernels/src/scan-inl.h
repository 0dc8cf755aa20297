// One chunk of one KV head: scores, online softmax and attention output in a single pass over K and
// V, tile by tile. Needs a Simd and score-inl.h.
//
// The softmax works in base 2 with an *integer* running maximum: every rescale is an exact power of
// two, so the weight 2^(score - maximum) of a row is the same number wherever the row stands and
// however the head was cut, and no second exponential pass is needed for the importance.
#pragma once

#include <cstdint>

#include "score-inl.h"

namespace herald {
namespace {

// 2^x for |x| <= 1/2; degree 6, relative error 2e-9 before rounding; 2^0 is exactly 1.
inline Simd::F exp2_fraction(Simd::F x) {
  Simd::F r = Simd::set(0x1.41d32ep-13f);
  r = Simd::fma(r, x, Simd::set(0x1.5f456ap-10f));
  r = Simd::fma(r, x, Simd::set(0x1.3b2dbcp-7f));
  r = Simd::fma(r, x, Simd::set(0x1.c6aed4p-5f));
  r = Simd::fma(r, x, Simd::set(0x1.ebfbdap-3f));
  r = Simd::fma(r, x, Simd::set(0x1.62e430p-1f));
  return Simd::fma(r, x, Simd::set(1.0f));
}

// 2^n for integer n <= 0; 0 below the normal range.
inline float exp2_integer(float n) {
  if (!(n >= -126.0f)) return 0;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  __builtin_memcpy(&power, &bits, 4);
  return power;
}

// Scores of one query in a tile -> weights in place. False when a score is not finite.
inline bool weigh_tile(float* scores, int64_t count, float log2_scale, float& maximum,
                       float& rescale, float& total) {
  const Simd::F scale = Simd::set(log2_scale);
  Simd::F peak = Simd::set(-__builtin_inff());
  bool finite = true;
  for (int64_t i = 0; i < count; i += Simd::kLanes) {
    const Simd::F s = Simd::mul(Simd::load(scores + i), scale);
    finite &= Simd::all_finite(s);
    peak = Simd::max(peak, Simd::round(s));
    Simd::store(scores + i, s);
  }
  if (!finite) return false;
  const float tile_maximum = Simd::largest(peak);
  rescale = 1;
  if (tile_maximum > maximum) {
    rescale = exp2_integer(maximum - tile_maximum);
    maximum = tile_maximum;
  }
  const Simd::F exponent = Simd::set(maximum);
  Simd::F sum = Simd::set(0);
  for (int64_t i = 0; i < count; i += Simd::kLanes) {
    const Simd::F s = Simd::load(scores + i), whole = Simd::round(s);
    Simd::F w = Simd::scale2(exp2_fraction(Simd::sub(s, whole)), Simd::sub(whole, exponent));
    if (count - i < Simd::kLanes) w = Simd::keep_first(w, count - i);
    Simd::store(scores + i, w);
    sum = Simd::add(sum, w);
  }
  total = Simd::sum(sum);
  return true;
}

// output[g] += sum over rows of weight[g][row] * V[row], for Q queries and P pairs of vectors.
template <class T, int Q, int P>
inline void add_values(const char* values, int64_t stride, int64_t rows, bool tail,
                       const float* weights, int64_t weight_stride, float* output,
                       int64_t output_stride) {
  Simd::F sums[Q][2 * P];
  for (int g = 0; g < Q; ++g)
    for (int i = 0; i < 2 * P; ++i)
      sums[g][i] = Simd::load(output + g * output_stride + i * Simd::kLanes);
  for (int64_t r = 0; r < rows; ++r) {
    const T* v = reinterpret_cast<const T*>(values + r * stride);
    Simd::F value[2 * P];
    for (int i = 0; i < P; ++i)
      Simd::load_pair(v + i * kPair, tail && i == P - 1, value[2 * i], value[2 * i + 1]);
    for (int g = 0; g < Q; ++g) {
      const Simd::F w = Simd::set(weights[g * weight_stride + r]);
      for (int i = 0; i < 2 * P; ++i) sums[g][i] = Simd::fma(w, value[i], sums[g][i]);
    }
  }
  for (int g = 0; g < Q; ++g)
    for (int i = 0; i < 2 * P; ++i)
      Simd::store(output + g * output_stride + i * Simd::kLanes, sums[g][i]);
}

template <class T, int Q>
inline void add_values_of(const char* values, int64_t stride, int64_t rows, int64_t dim,
                          const float* weights, int64_t weight_stride, float* output,
                          int64_t output_stride) {
  constexpr int P = Simd::kOutputPairs;
  int64_t d = 0;
  for (; P > 1 && d + (P - 1) * kPair < dim; d += P * kPair)
    add_values<T, Q, P>(values + d * sizeof(T), stride, rows, d + P * kPair > dim, weights,
                        weight_stride, output + d, output_stride);
  for (; d < dim; d += kPair)
    add_values<T, Q, 1>(values + d * sizeof(T), stride, rows, d + kPair > dim, weights,
                        weight_stride, output + d, output_stride);
}

template <class Dot>
bool scan_chunk_as(const ChunkScan& c) {
  using T = typename Dot::Key;
  const int64_t padded = round_up(c.dim, kDimPad), group = c.group;
  const int64_t stride = c.dim * static_cast<int64_t>(sizeof(T));
  const auto* query = static_cast<const typename Dot::QueryItem*>(c.query);
  for (int64_t g = 0; g < group; ++g) {
    c.maximum[g] = -__builtin_inff();
    c.normaliser[g] = 0;
  }
  if (c.values)
    for (int64_t i = 0; i < group * padded; ++i) c.output[i] = 0;

  for (int64_t row = c.begin; row < c.end; row += kTileRows) {
    const int64_t count = c.end - row < kTileRows ? c.end - row : kTileRows;
    const char* first = static_cast<const char*>(c.keys) + row * stride;
    float* weights = c.weights + row;
    const TileRows tile{first, stride, count, c.dim, c.prefetch_bytes};
    score_tile<Dot>(tile, query, padded, group, weights, c.weight_stride);
    for (int64_t g = 0; g < group; ++g) {
      float rescale, total;
      if (!weigh_tile(weights + g * c.weight_stride, count, c.log2_scale, c.maximum[g], rescale,
                      total))
        return false;
      c.exponents[row / kTileRows * group + g] = c.maximum[g];
      c.normaliser[g] = c.normaliser[g] * rescale + total;
      if (c.values && rescale != 1)
        for (int64_t d = 0; d < padded; ++d) c.output[g * padded + d] *= rescale;
    }
    if (!c.values) continue;
    const char* values = static_cast<const char*>(c.values) + row * stride;
    int64_t g = 0;
    const auto step = [&](auto add, int64_t queries) {
      add(values, stride, count, c.dim, weights + g * c.weight_stride, c.weight_stride,
          c.output + g * padded, padded);
      g += queries;
    };
    while (group - g >= 4) step(add_values_of<T, 4>, 4);
    if (group - g >= 2) step(add_values_of<T, 2>, 2);
    if (group - g >= 1) step(add_values_of<T, 1>, 1);
  }
  return true;
}

template <class Dot>
void prepare_query_as(const float* query, int64_t group, int64_t dim, void* prepared) {
  const int64_t padded = round_up(dim, kDimPad);
  auto* to = static_cast<typename Dot::QueryItem*>(prepared);
  for (int64_t g = 0; g < group; ++g) Dot::prepare(query + g * dim, dim, padded, to + g * padded);
}

template <class Dot>
float single_score_as(const float* query, const float* key, int64_t dim) {
  float sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += Dot::rounded(query[d]) * key[d];
  return sum;
}

void unpack_output(DType dtype, const float* output, int64_t dim, float factor, float* natural) {
  for (int64_t d = 0; d < dim; ++d) {
    const int64_t at =
        dtype == DType::kBFloat16 ? lane_position<uint16_t>(d) : lane_position<float>(d);
    natural[d] = output[at] * factor;
  }
}

}  // namespace
}  // namespace herald
