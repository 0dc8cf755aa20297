// Selection among candidates by their exact scores, and top-k by itself.
#pragma once

#include <cstdint>
#include <vector>

#include "attend.h"

namespace herald {

struct RerankCall {
  DType dtype;
  std::vector<Extent> slots;
  int64_t heads, group, dim;
  const float* query;         // [slots][heads * group][dim]
  const int32_t* candidates;  // [slots][heads][candidate_capacity], ascending
  int64_t candidate_capacity;
  const int32_t* counts;  // [slots]
  const int32_t* budget;  // [slots]
  int32_t* indices;       // [slots][heads][capacity]
  int64_t capacity;
  int64_t sinks, recent;
  const float* elsewhere;  // [slots][heads * group] log of attended mass elsewhere, or null
  float scale;
  int32_t* status;  // [slots]
  int threads;
};

// Candidates must lie in their extents. Throws std::bad_alloc before anything is written.
void rerank(const RerankCall& call);

// The `count` largest of values[0, rows), which must not be negative, ascending by row; ties go to
// the lower row.
void top_k(const float* values, int64_t rows, int64_t count, int32_t* indices);

}  // namespace herald
