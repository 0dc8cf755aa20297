// How vectors lie in lanes. Needs a Simd.
#pragma once

#include <cstdint>

#include "kernel_table.h"

namespace herald {
namespace {

constexpr int64_t kPair = 2 * Simd::kLanes;

// For scorers that need nothing of their thread.
struct NoSession {
  explicit NoSession(const ChunkScan&) {}
};

// Where natural dimension d stands in the variant's lane order: a bf16 pair load splits even and
// odd positions instead of paying for a shuffle.
template <class T>
inline int64_t lane_position(int64_t d) {
  if (sizeof(T) == 4) return d;
  const int64_t within = d % kPair;
  return d - within + (within & 1) * Simd::kLanes + within / 2;
}

}  // namespace
}  // namespace herald
