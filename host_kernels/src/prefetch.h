// How far ahead scans ask for memory. What helps differs between machines, in sign even, so it is
// measured once on each; see calibrate_prefetch in prefetch.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace herald {

// Which cache a line is asked into; in the order of the names in prefetch.py.
enum class Hint { kNone, kT0, kT1, kNta };

struct Prefetch {
  Hint hint = Hint::kNone;
  int64_t distance = 0;  // bytes ahead of what is being read
  int streams = 1;       // chunks that a scan reads in turns, each a sequential stream
};

constexpr int kMaxStreams = 4;
constexpr int64_t kMaxPrefetchDistance = 65536;

// The setting in force: the last one set, else a guess from the CPU's maker.
Prefetch prefetch();
// Throws std::invalid_argument when a field lies outside its range.
void set_prefetch(const Prefetch& setting);

// Bytes per second at which `threads` threads, all at once, scan bf16 keys [rows][128] for four
// queries with this setting, the keys being in no cache. 0 where this CPU cannot empty its caches
// of them. Throws std::bad_alloc.
double cold_scan_rate(char* buffer, size_t bytes, const Prefetch& setting, int threads);

}  // namespace herald
