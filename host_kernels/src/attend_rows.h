// Attention over rows that were selected before, and over the rows behind the selectable ones.
#pragma once

#include <cstdint>
#include <vector>

#include "attend.h"

namespace herald {

struct AttendRowsCall {
  DType dtype;
  std::vector<Extent> slots;
  int64_t heads, group, dim;
  const float* query;      // [slots][heads * group][dim]
  const int32_t* indices;  // [slots][heads][capacity]
  int64_t capacity;
  const int32_t* counts;  // [slots], of indices
  // Rows [tail_begin, tail_end) of a slot are attended too.
  const int32_t *tail_begin, *tail_end;
  const float *self_key, *self_value;  // [slots][heads][dim], or both null
  float scale;
  float* output;    // [slots][heads * group][dim]
  int32_t* status;  // [slots]: 0 ok, 1 a score or an output was not finite
  int threads;
};

// Rows must lie in their extents. Throws std::bad_alloc before anything is written.
void attend_rows(const AttendRowsCall& call);

}  // namespace herald
