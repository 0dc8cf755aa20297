#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "cpu_features.h"
#include "thread_pool.h"

namespace herald {
namespace {

// Every participant takes one contiguous share, in whole lines of the read loop.
template <class Work>
double fastest(size_t bytes, int threads, int repeats, const Work& work) {
  PoolLease lease(threads);
  const size_t lines = bytes / 256, count = static_cast<size_t>(lease.threads());
  double best = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    lease.run([&](int index) {
      const size_t i = static_cast<size_t>(index);
      const size_t begin = lines * i / count * 256, end = lines * (i + 1) / count * 256;
      work(begin, end - begin);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(lines * 256) / std::max(seconds.count(), 1e-9));
  }
  return best;
}

}  // namespace

double read_bandwidth(const char* data, size_t bytes, int threads, int repeats, ReadLoop loop) {
  const KernelTable& table = active_table();
  // Publishing the sums keeps the compiler from dropping the reads.
  std::atomic<uint64_t> sink{0};
  return fastest(bytes, threads, repeats, [&](size_t at, size_t size) {
    sink.fetch_xor(
        table.read_bytes(data + at, static_cast<int64_t>(size), loop.streams, loop.ahead));
  });
}

double copy_bandwidth(const char* from, char* to, size_t bytes, int threads, int repeats) {
  return fastest(bytes, threads, repeats,
                 [&](size_t at, size_t size) { std::memcpy(to + at, from + at, size); });
}

}  // namespace herald
