// Moving rows between a slot's extent and position-major buffers.
#pragma once

#include <cstdint>
#include <vector>

#include "attend.h"
#include "kernel_table.h"

namespace herald {

struct GatherCall {
  DType dtype;
  std::vector<Extent> slots;
  int64_t heads, dim;
  const int32_t* indices;  // [slots][heads][capacity]
  int64_t capacity;
  const int32_t* counts;  // [slots]
  char* keys;             // [slots][rows][heads][dim]
  char* values;
  int64_t rows, row_offset;
  int threads;
};

struct BadIndex {
  bool found;
  int64_t slot, head, position;
};

struct IndexCall {
  DType dtype, kind;  // of the keys; of the index
  std::vector<Extent> slots, index;
  int64_t heads, dim;
  const int32_t* start;   // [slots]
  const int32_t* counts;  // [slots]
  int threads;
};

// Writes the key index of rows [start, start + counts).
void index_rows(const IndexCall& call);

// Rows named for every KV head of some slots.
struct RowLists {
  const std::vector<Extent>& slots;
  int64_t heads;
  const int32_t* indices;  // [slots][heads][capacity]
  int64_t capacity;
  const int32_t* counts;  // [slots]
};

// The first index outside its slot, if any; the rows must not be touched then.
BadIndex find_bad_index(const RowLists& lists);
void gather(const GatherCall& call);

struct StoreCall {
  DType dtype;
  std::vector<Extent> slots;
  int64_t heads, dim;
  const int32_t* start;   // [slots]
  const int32_t* counts;  // [slots]
  const char* keys;       // [slots][rows][heads][dim]
  const char* values;
  int64_t rows;
  int threads;
};

void store(const StoreCall& call);

}  // namespace herald
