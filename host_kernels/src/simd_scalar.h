// Eight lanes in plain C++: the path every machine has. Included by one translation unit only.
#pragma once

#include <cstdint>
#include <cstring>

namespace herald {
namespace {

struct Simd {
  static constexpr int kLanes = 8;
  static constexpr int kOutputPairs = 1;
  struct F {
    float lane[kLanes];
  };

  template <class Op>
  static F map(Op op) {
    F r;
    for (int i = 0; i < kLanes; ++i) r.lane[i] = op(i);
    return r;
  }
  template <class Test>
  static uint32_t mask(Test test) {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(test(i)) << i;
    return bits;
  }

  static F set(float x) {
    return map([&](int) { return x; });
  }
  static F load(const float* p) {
    F r;
    std::memcpy(&r, p, sizeof r);
    return r;
  }
  // Integers as floats.
  static F load_integers(const int32_t* p) {
    return map([&](int i) { return static_cast<float>(p[i]); });
  }
  static void store(float* p, const F& x) { std::memcpy(p, &x, sizeof x); }
  static F add(const F& a, const F& b) {
    return map([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static F sub(const F& a, const F& b) {
    return map([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static F mul(const F& a, const F& b) {
    return map([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static F fma(const F& a, const F& b, const F& c) {
    return map([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  static F max(const F& a, const F& b) {
    return map([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static F round(const F& x) {
    // Adding 2^23 leaves no fraction bits; larger numbers are integers already.
    return map([&](int i) {
      const float v = x.lane[i], size = v < 0 ? -v : v;
      const float whole = (size + 0x1p23f) - 0x1p23f;
      return size < 0x1p23f ? (v < 0 ? -whole : whole) : v;
    });
  }
  // x * 2^n for integer n <= 0; results below the normal range become 0. Any other n gives some
  // number, which nobody looks at.
  static F scale2(const F& x, const F& n) {
    return map([&](int i) {
      const float low = n.lane[i] > -127.0f ? n.lane[i] : -127.0f;
      const float clamped = low < 127.0f ? low : 127.0f;
      const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(clamped) + 127) << 23;
      float power;
      std::memcpy(&power, &bits, 4);
      return x.lane[i] * power;
    });
  }
  static bool all_finite(const F& x) {
    return mask([&](int i) { return x.lane[i] - x.lane[i] == 0; }) == 0xff;
  }
  // sum + x where x is not below the floor.
  static F add_at_least(const F& sum, const F& x, float floor) {
    return map([&](int i) { return x.lane[i] >= floor ? sum.lane[i] + x.lane[i] : sum.lane[i]; });
  }
  static F keep_first(const F& x, int64_t count) {
    return map([&](int i) { return i < count ? x.lane[i] : 0.0f; });
  }
  static uint32_t greater(const F& a, const F& b) {
    return mask([&](int i) { return a.lane[i] > b.lane[i]; });
  }
  static uint32_t at_least(const F& a, const F& b) {
    return mask([&](int i) { return a.lane[i] >= b.lane[i]; });
  }
  // Whether a lane of `a` is greater than that of `b`, or either is not a number.
  static bool exceeds(const F& a, const F& b) {
    return mask([&](int i) { return !(a.lane[i] <= b.lane[i]); }) != 0;
  }
  // The lanes of a mask side by side; more than they may be written, up to all lanes.
  static void store_chosen(float* p, const F& x, uint32_t lanes) {
    for (; lanes; lanes &= lanes - 1) *p++ = x.lane[__builtin_ctz(lanes)];
  }
  static float sum(const F& x) {
    const float* v = x.lane;
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
  static float largest(const F& x) {
    float m = x.lane[0];
    for (int i = 1; i < kLanes; ++i) m = x.lane[i] > m ? x.lane[i] : m;
    return m;
  }
  // Lane i of the result is the sum of the lanes of x[i].
  static F transpose_sum(const F (&x)[kLanes]) {
    return map([&](int i) { return sum(x[i]); });
  }
  // Copies a line of 64 bytes without keeping it in the caches, where that is possible; streams
  // must be ended before other threads look.
  static void stream_line(const char* from, char* to) { std::memcpy(to, from, 64); }
  static void end_streams() {}
  // 2 * kLanes bf16 values: even positions to `a`, odd ones to `b`.
  static void load_pair(const uint16_t* p, bool, F& a, F& b) {
    for (int i = 0; i < kLanes; ++i) {
      uint32_t word;
      std::memcpy(&word, p + 2 * i, 4);
      const uint32_t low = word << 16, high = word & 0xffff0000u;
      std::memcpy(&a.lane[i], &low, 4);
      std::memcpy(&b.lane[i], &high, 4);
    }
  }
  static void load_pair(const float* p, bool, F& a, F& b) {
    a = load(p);
    b = load(p + kLanes);
  }
};

}  // namespace
}  // namespace herald
