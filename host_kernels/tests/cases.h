// Random calls of the fused kernel, in memory blocks of exactly the right size so that a sanitizer
// sees every step beyond an edge.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "attend.h"

namespace cases {

using herald::DType;

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}

// One slot and what was asked of it; numbers are rounded to bf16, so both dtypes hold the same.
struct Case {
  Case(DType dtype_, int64_t heads_, int64_t group_, int64_t dim_, int64_t rows, uint32_t seed)
      : dtype(dtype_), heads(heads_), group(group_), dim(dim_) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    query.resize(static_cast<size_t>(heads * group * dim));
    for (float& x : query) x = from_bf16(to_bf16(2 * normal(random)));
    numbers.resize(static_cast<size_t>(heads * rows * 2 * dim));
    for (float& x : numbers) x = from_bf16(to_bf16(normal(random)));
    self.resize(static_cast<size_t>(heads * dim));
    for (float& x : self) x = normal(random);
    attend_len = static_cast<int32_t>(rows);
    select_len = static_cast<int32_t>(rows > 2 ? rows - 2 : rows);
    budget = select_len / 5;
    output.assign(query.size(), -7);
    pack();
  }

  // After a change of `numbers`.
  void pack() {
    storage.resize(numbers.size() * (dtype == DType::kBFloat16 ? 2 : 4));
    for (size_t i = 0; i < numbers.size(); ++i) {
      const uint16_t half = to_bf16(numbers[i]);
      if (dtype == DType::kBFloat16)
        std::memcpy(storage.data() + 2 * i, &half, 2);
      else
        std::memcpy(storage.data() + 4 * i, &numbers[i], 4);
    }
    indices.assign(static_cast<size_t>(heads * (budget + 1)), -5);
  }

  int64_t rows() const { return static_cast<int64_t>(numbers.size()) / (heads * 2 * dim); }
  const float* row(int64_t head, int64_t r) const {
    return numbers.data() + (2 * head * rows() + r) * dim;
  }
  // From a row's key to its value.
  int64_t plane() const { return rows() * dim; }

  herald::AttendCall call(int threads, bool with_self, bool with_output) {
    herald::AttendCall c;
    c.dtype = dtype;
    c.slots = {{storage.data(), rows()}};
    c.heads = heads;
    c.group = group;
    c.dim = dim;
    c.query = query.data();
    c.attend_len = &attend_len;
    c.select_len = &select_len;
    c.budget = &budget;
    c.indices = indices.data();
    c.capacity = budget + 1;
    c.sinks = 2;
    if (with_self) c.self_key = c.self_value = self.data();
    c.scale = 0.25f;
    if (with_output) c.output = output.data();
    c.status = &status;
    c.threads = threads;
    return c;
  }

  DType dtype;
  int64_t heads, group, dim;
  std::vector<float> query, numbers, self, output;
  std::vector<char> storage;
  std::vector<int32_t> indices;
  int32_t attend_len, select_len, budget, status = -1;
};

}  // namespace cases
