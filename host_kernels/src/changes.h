// Gathering the rows that a new selection has and the previous one lacked.
#pragma once

#include <cstdint>
#include <vector>

#include "attend.h"

namespace herald {

struct ChangesCall {
  DType dtype;
  std::vector<Extent> slots;
  int64_t heads, dim;
  const int32_t* indices;  // [slots][heads][capacity], ascending
  int64_t capacity;
  const int32_t* counts;    // [slots]
  const int32_t* previous;  // [slots][heads][previous_capacity], ascending
  int64_t previous_capacity;
  const int32_t* previous_counts;  // [slots]
  int32_t* source;                 // like indices: place in the previous selection, or -1 - row
  char* keys;                      // [rows][dim]
  char* values;
  int64_t rows;
  int threads;
};

// How many rows are new; those beyond `rows` are numbered but not copied. Indices must have been
// validated.
int64_t gather_changes(const ChangesCall& call);

}  // namespace herald
