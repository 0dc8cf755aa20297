// The fused kernel over all slots: exact attention, importance and top-k per KV head.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_table.h"

namespace herald {

// One slot's rows, [heads][2][rows][dim]: a head's K rows, then its V rows; or its key index,
// [heads][rows / kTileRows] tiles.
struct Extent {
  char* data;
  int64_t rows;
};

struct AttendCall {
  DType dtype;
  std::vector<Extent> slots;
  int64_t heads, group, dim;
  const float* query;  // [slots][heads * group][dim]
  const int32_t* attend_len;
  const int32_t* select_len;
  const int32_t* budget;
  int32_t* indices;  // [slots][heads][capacity]
  int64_t capacity;
  int64_t sinks, recent = 0;
  const float* self_key = nullptr;  // [slots][heads][dim], with self_value, or null
  const float* self_value = nullptr;
  // [slots][heads * group], written: log of the mass that is attended and not selected, or null;
  // for at most kQuerySet queries a head.
  float* log_rest = nullptr;
  const float* elsewhere = nullptr;  // [slots][heads * group] log of attended mass outside, or null
  float scale;
  float* output = nullptr;  // [slots][heads * group][dim]; null: keys only
  int32_t* status;          // [slots]: 0 ok, 1 a score or an output was not finite
  int threads;
};

// Lengths must have been validated. Throws std::bad_alloc before anything is written.
void attend_select(const AttendCall& call);

}  // namespace herald
