// Top-k with a binary heap, as the paper's kernel has it: the yardstick for the histogram, and a
// second opinion on what it selects.
#pragma once

#include <cstdint>
#include <vector>

namespace herald {

// The `count` (at most n) largest of values[0, n), equal ones by lower index, in no order.
std::vector<int32_t> heap_top_k(const float* values, int64_t n, int64_t count);

}  // namespace herald
