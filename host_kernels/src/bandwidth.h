// How fast this machine's memory is for the pool's threads: the yardstick for the scan.
#pragma once

#include <cstddef>

namespace herald {

// Bytes per second of the fastest of `repeats` runs.
double read_bandwidth(const char* data, size_t bytes, int threads, int repeats);
// Counts the bytes copied once, not the reads and the writes.
double copy_bandwidth(const char* from, char* to, size_t bytes, int threads, int repeats);

}  // namespace herald
