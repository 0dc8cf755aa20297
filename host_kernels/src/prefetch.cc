#include "prefetch.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "cpu_features.h"
#include "thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace herald {
namespace {

// The fields in one word, so that a scan never sees half of a change; 0 is "not set".
std::atomic<uint64_t> in_force{0};

uint64_t pack(const Prefetch& p) {
  return static_cast<uint64_t>(p.distance) << 16 | static_cast<uint64_t>(p.streams) << 8 |
         static_cast<uint64_t>(p.hint);
}

Prefetch unpack(uint64_t word) {
  return {static_cast<Hint>(word & 0xff), static_cast<int64_t>(word >> 16),
          static_cast<int>(word >> 8 & 0xff)};
}

#if defined(__x86_64__)
__attribute__((target("clflushopt"))) void flush_optimised(const char* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) _mm_clflushopt(const_cast<char*>(from) + at);
}

// clflush orders itself against everything and takes several times longer, but is always there.
bool flush(const char* from, size_t bytes, bool optimised) {
  if (optimised)
    flush_optimised(from, bytes);
  else
    for (size_t at = 0; at < bytes; at += 64) _mm_clflush(from + at);
  _mm_mfence();
  return true;
}
#else
bool flush(const char*, size_t, bool) { return false; }
#endif

// This thread's CPU time, waits for memory included: on a busy machine the clock on the wall would
// tell of the neighbours.
double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

constexpr int64_t kDim = 128, kGroup = 4;
constexpr int64_t kRowBytes = 2 * kDim;

// Scans `rows` rows at `keys`, one chunk after another as for a head.
void scan_rows(const KernelTable& table, const char* keys, int64_t rows, const Prefetch& setting,
               char* scratch) {
  alignas(64) float maximum[kMaxStreams * kGroup], normaliser[kMaxStreams * kGroup];
  alignas(64) float lanes[kMaxStreams * kGroup * kMaxLanes];
  const int64_t query_bytes = round_up(table.query_bytes(DType::kBFloat16, kGroup, kDim), 64);
  ChunkScan scan{};
  scan.keys = keys;
  scan.group = kGroup;
  scan.dim = kDim;
  scan.query = scratch;
  scan.log2_scale = 1;
  scan.weights = reinterpret_cast<float*>(scratch + query_bytes);
  scan.exponents = scan.weights + kGroup * rows;
  while (scan.end < rows) {
    ChunkScan turns[kMaxStreams];
    Ahead ahead[kMaxStreams];
    int64_t count = 0;
    for (; count < setting.streams && scan.end < rows; ++count) {
      scan.begin = scan.end;
      scan.end = std::min(rows, scan.begin + kChunkRows);
      scan.lanes = lanes + count * kGroup * kMaxLanes;
      scan.maximum = maximum + count * kGroup;
      scan.normaliser = normaliser + count * kGroup;
      ahead[count] = look_ahead(setting, keys + scan.begin * kRowBytes, nullptr,
                                kTileRows * kRowBytes, (scan.end - scan.begin) / kTileRows);
      scan.ahead = &ahead[count];
      turns[count] = scan;
    }
    table.scan_chunks(DType::kBFloat16, turns, count);
  }
}

}  // namespace

Prefetch prefetch() {
  if (const uint64_t word = in_force.load(std::memory_order_relaxed)) return unpack(word);
  // Lines asked for ahead are a gain on Intel's servers and a loss on AMD's, whose own prefetcher
  // keeps up.
  static const bool helps = read_cpu_state().vendor == "GenuineIntel";
  return helps ? Prefetch{Hint::kT1, 8192, 1} : Prefetch{};
}

void set_prefetch(const Prefetch& p) {
  const bool none = p.hint == Hint::kNone;
  if (p.hint < Hint::kNone || p.hint > Hint::kNta || p.streams < 1 || p.streams > kMaxStreams ||
      p.distance < (none ? 0 : 1) || p.distance > (none ? 0 : kMaxPrefetchDistance))
    throw std::invalid_argument("no such prefetch setting");
  in_force.store(pack(p), std::memory_order_relaxed);
}

double cold_scan_rate(char* buffer, size_t bytes, const Prefetch& setting, int threads) {
  const KernelTable& table = active_table();
  const bool optimised = read_cpu_state().leaf7_ebx >> 23 & 1;
  PoolLease lease(threads);
  const int count = lease.threads();
  const int64_t rows = static_cast<int64_t>(bytes) / kRowBytes / count / kTileRows * kTileRows;
  if (rows == 0) return 0;
  const int64_t query_bytes = round_up(table.query_bytes(DType::kBFloat16, kGroup, kDim), 64);
  lease.reserve_each(
      static_cast<size_t>(query_bytes + kGroup * rows * 4 + rows / kTileRows * kGroup * 4 + 64));
  auto* took =
      static_cast<double*>(lease.call_scratch(sizeof(double) * static_cast<size_t>(count)));
  std::atomic<int> ready{0};
  lease.run([&](int index) {
    const float query[kGroup * kDim] = {};
    auto* scratch = static_cast<char*>(lease.scratch_of(index));
    table.prepare_query(DType::kBFloat16, query, kGroup, kDim, scratch);
    const char* keys = buffer + index * rows * kRowBytes;
    const bool cold = flush(keys, static_cast<size_t>(rows * kRowBytes), optimised);
    // All at once: the threads share what they are to be measured against.
    ready.fetch_add(1);
    while (ready.load() < count) std::this_thread::yield();
    const double start = thread_seconds();
    scan_rows(table, keys, rows, setting, scratch);
    took[index] = cold ? thread_seconds() - start : 0;
  });
  const double longest = *std::max_element(took, took + count);
  return longest > 0 ? static_cast<double>(rows * kRowBytes * count) / longest : 0;
}

}  // namespace herald
