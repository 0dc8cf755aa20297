// How vectors lie in lanes, and asking for memory ahead. Needs a Simd.
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

inline bool looks_ahead(const Prefetch& p) { return p.hint != Hint::kNone; }

// Asks for what lies `p.distance` beyond these bytes. Addresses past the end of the extent do no
// harm.
inline void prefetch_beyond(const Prefetch& p, const void* from, int64_t bytes) {
  const auto base = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(p.distance);
  const auto each_line = [&](auto ask) {
    for (int64_t b = 0; b < bytes; b += 64) ask(reinterpret_cast<const void*>(base + b));
  };
  if (p.hint == Hint::kT0) each_line([](const void* at) { __builtin_prefetch(at, 0, 3); });
  if (p.hint == Hint::kT1) each_line([](const void* at) { __builtin_prefetch(at, 0, 2); });
  if (p.hint == Hint::kNta) each_line([](const void* at) { __builtin_prefetch(at, 0, 0); });
}

}  // namespace
}  // namespace herald
