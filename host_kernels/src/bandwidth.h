// How fast this machine's memory is for the pool's threads: the yardstick for the scan.
#pragma once

#include <cstddef>
#include <cstdint>

namespace herald {

// How a read loop goes through its share: as so many sequential streams side by side, prefetched so
// many bytes ahead.
struct ReadLoop {
  int64_t streams = 1, ahead = 0;
};

// Bytes per second of the fastest of `repeats` runs.
double read_bandwidth(const char* data, size_t bytes, int threads, int repeats, ReadLoop loop = {});
// Counts the bytes copied once, not the reads and the writes.
double copy_bandwidth(const char* from, char* to, size_t bytes, int threads, int repeats);

}  // namespace herald
