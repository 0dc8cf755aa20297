// The softmax of a tile. It works in base 2 with an *integer* running maximum: every rescale is an
// exact power of two, so the weight 2^(score - maximum) of a row is the same number wherever the
// row stands and however the head was cut, and no second exponential pass is needed for the
// importance. Needs a Simd and kernel_table.h.
#pragma once

#include <cstdint>

#include "kernel_table.h"

namespace herald {
namespace {

// 2^x for |x| <= 1/2; degree 5, relative error 9e-8 before rounding; 2^0 is exactly 1.
inline Simd::F exp2_fraction(Simd::F x) {
  Simd::F r = Simd::set(0x1.5bb9e6p-10f);
  r = Simd::fma(r, x, Simd::set(0x1.3cea8cp-7f));
  r = Simd::fma(r, x, Simd::set(0x1.c6b754p-5f));
  r = Simd::fma(r, x, Simd::set(0x1.ebf9bcp-3f));
  r = Simd::fma(r, x, Simd::set(0x1.62e42ap-1f));
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

// 2^(score * scale - exponent).
inline Simd::F weigh(Simd::F score, Simd::F scale, Simd::F exponent, Simd::F& whole) {
  const Simd::F s = Simd::mul(score, scale);
  whole = Simd::round(s);
  return Simd::scale2(exp2_fraction(Simd::sub(s, whole)), Simd::sub(whole, exponent));
}

// Weights of a tile's scores, all of which count if it is whole, and their sum, lane by lane.
// False, and the weights mean nothing, where a score lies above the exponent or is not a number.
template <bool kWhole>
inline bool weigh_below(const float* scores, int64_t count, float scale, float exponent,
                        float* weights, Simd::F& sum) {
  const Simd::F factor = Simd::set(scale), limit = Simd::set(exponent);
  bool below = true;
  sum = Simd::set(0);
  for (int64_t i = 0; i < kTileRows; i += Simd::kLanes) {
    Simd::F whole;
    Simd::F w = weigh(Simd::load(scores + i), factor, limit, whole);
    below &= !Simd::exceeds(whole, limit);
    if (!kWhole) w = Simd::keep_first(w, count > i ? count - i : 0);
    Simd::store(weights + i, w);
    sum = Simd::add(sum, w);
  }
  return below;
}

// The integer maximum of a tile's scores; false where one is not finite.
inline bool find_exponent(const float* scores, float scale, float& exponent) {
  const Simd::F factor = Simd::set(scale);
  Simd::F peak = Simd::set(-__builtin_inff());
  bool finite = true;
  for (int64_t i = 0; i < kTileRows; i += Simd::kLanes) {
    const Simd::F s = Simd::mul(Simd::load(scores + i), factor);
    finite &= Simd::all_finite(s);
    peak = Simd::max(peak, Simd::round(s));
  }
  exponent = Simd::largest(peak);
  return finite;
}

// Scores of one query in a tile -> weights, their sum and, where the maximum grew, what earlier
// weights are to be multiplied by. A maximum seldom grows, so that is looked into only when a score
// turns out to lie above it. False when a score is not finite.
template <bool kWhole>
inline bool weigh_tile(const float* scores, int64_t count, float scale, float& maximum,
                       float& rescale, float* weights, Simd::F& sum) {
  rescale = 1;
  if (weigh_below<kWhole>(scores, count, scale, maximum, weights, sum)) return true;
  float peak;
  if (!find_exponent(scores, scale, peak)) return false;
  rescale = exp2_integer(maximum - peak);
  maximum = peak;
  weigh_below<kWhole>(scores, count, scale, maximum, weights, sum);
  return true;
}

// Adds what a query gives to the importance of rows; too little counts as zero, see
// kImportanceFloor.
inline Simd::F add_share(Simd::F sum, Simd::F weight, Simd::F factor) {
  return Simd::add_at_least(sum, Simd::mul(weight, factor), kImportanceFloor);
}

// Scores of the rows that a short tile lacks repeat the last one: the maximum takes no notice.
inline void pad_scores(float* scores, int64_t count) {
  for (int64_t i = count; i < kTileRows; ++i) scores[i] = scores[count - 1];
}

}  // namespace
}  // namespace herald
