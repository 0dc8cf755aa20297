// How vectors lie in lanes, and asking for memory ahead. Needs a Simd.
#pragma once

#include <cstdint>

#include "kernel_table.h"

namespace herald {
namespace {

constexpr int64_t kPair = 2 * Simd::kLanes;

// Where natural dimension d stands in the variant's lane order: a bf16 pair load splits even and
// odd positions instead of paying for a shuffle.
template <class T>
inline int64_t lane_position(int64_t d) {
  if (sizeof(T) == 4) return d;
  const int64_t within = d % kPair;
  return d - within + (within & 1) * Simd::kLanes + within / 2;
}

// Asks for the bytes that lie `distance` behind those named. Addresses past the end of an extent do
// no harm.
inline void prefetch_ahead(const Prefetch& prefetch, const void* from, int64_t bytes) {
  const auto base = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(prefetch.distance);
  const auto line = [base](int64_t b) { return reinterpret_cast<const void*>(base + b); };
  switch (prefetch.hint) {
    case PrefetchHint::kNone:
      return;
    case PrefetchHint::kT0:
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(line(b), 0, 3);
      return;
    case PrefetchHint::kT1:
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(line(b), 0, 2);
      return;
    case PrefetchHint::kNta:
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(line(b), 0, 0);
      return;
  }
}

}  // namespace
}  // namespace herald
