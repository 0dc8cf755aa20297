#include "roof.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "cpu_features.h"
#include "thread_pool.h"

namespace herald {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::max(std::chrono::duration<double>(Clock::now() - start).count(), 1e-9);
}

}  // namespace

double compute_roof(DType dtype, int threads) {
  constexpr int kRepeats = 8;
  const KernelTable& table = active_table();
  PoolLease lease(threads);
  std::atomic<float> sink{0};
  double best = 0;
  int64_t rounds = 1 << 14;
  for (int repeat = 0; repeat < kRepeats;) {
    std::atomic<int64_t> done{0};
    const auto start = Clock::now();
    lease.run([&](int) {
      float sum = 0;
      done += table.multiply_adds(dtype, rounds, &sum);
      sink = sum;
    });
    const double seconds = seconds_since(start);
    if (done == 0) return 0;
    if (seconds < 0.01) {
      // Too short to be timed.
      rounds *= 2;
      continue;
    }
    best = std::max(best, static_cast<double>(done) / seconds);
    ++repeat;
  }
  return best;
}

double clock_rate() {
  // An exclusive or of two registers takes one cycle everywhere; additions of constants may be
  // done before they are executed.
  constexpr int64_t kRounds = 1 << 19;
  uint64_t x = 1, y = 3;
  double best = 0;
  for (int repeat = 0; repeat < 8; ++repeat) {
    const auto start = Clock::now();
    for (int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        asm volatile("" : "+r"(x), "+r"(y));
        x ^= y;
      }
    }
    best = std::max(best, 16 * kRounds / seconds_since(start));
  }
  return best;
}

}  // namespace herald
