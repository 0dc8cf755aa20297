// The steady state: after a first call of a shape, the same call allocates nothing, faults in no
// page and finds every lock free. Counted from outside: this program's malloc and its locks are
// stand-ins that count, and the kernel counts the faults.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cases.h"
#include "changes.h"
#include "check.h"
#include "cpu_features.h"
#include "rerank.h"
#include "rows.h"

namespace {
std::atomic<long> allocations{0}, busy_locks{0};
}

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) {
  ++allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  ++allocations;
  return __libc_calloc(count, bytes);
}
void* realloc(void* block, size_t bytes) {
  ++allocations;
  return __libc_realloc(block, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  ++allocations;
  return __libc_memalign(alignment, bytes);
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static const auto wait =
      reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  const int got = pthread_mutex_trylock(mutex);
  if (got != EBUSY) return got;
  ++busy_locks;
  return wait(mutex);
}
}  // extern "C"

namespace {

using cases::Case;
using herald::DType;

struct Counts {
  long allocated, faulted, waited;
};

long faults() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

template <class Call>
Counts counted(const Call& call) {
  const long allocated = allocations, waited = busy_locks, faulted = faults();
  call();
  return {allocations - allocated, faults() - faulted, busy_locks - waited};
}

// The counters count: without this a steady state would prove nothing.
void counters() {
  const Counts memory = counted([] {
    void* volatile block = std::malloc(100);
    std::free(block);
    std::vector<int>* volatile list = new std::vector<int>(10);
    delete list;
  });
  CHECK(memory.allocated == 3, "%ld", memory.allocated);
  const Counts pages = counted([] {
    void* fresh =
        mmap(nullptr, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(fresh, 1 << 16, MADV_NOHUGEPAGE);
    std::memset(fresh, 1, 1 << 16);
    munmap(fresh, 1 << 16);
  });
  CHECK(pages.faulted >= 16, "%ld", pages.faulted);
  std::mutex mutex;
  mutex.lock();
  const long before = busy_locks;
  std::thread waiting([&] { std::lock_guard<std::mutex> lock(mutex); });
  while (busy_locks == before) std::this_thread::yield();
  mutex.unlock();
  waiting.join();
}

// Faults may also be the system's own doing, as when it merges pages; those do not come every time.
template <class Call>
void steady(const std::string& what, const Call& call) {
  call();
  long fewest = -1;
  for (int round = 0; round < 5 && fewest != 0; ++round) {
    const Counts counts = counted([&] {
      for (int i = 0; i < 10; ++i) call();
    });
    CHECK(counts.allocated == 0, "%s: %ld allocations", what.c_str(), counts.allocated);
    CHECK(counts.waited == 0, "%s: %ld busy locks", what.c_str(), counts.waited);
    fewest = fewest < 0 ? counts.faulted : std::min(fewest, counts.faulted);
  }
  CHECK(fewest == 0, "%s: %ld page faults", what.c_str(), fewest);
  std::printf("%s: 0 allocations, %ld page faults, 0 busy locks in 10 calls\n", what.c_str(),
              fewest);
}

void kernels(const std::string& isa, int threads) {
  const std::string where = " on " + isa + ", " + std::to_string(threads) + " threads";
  // Two heads of 4200 rows are cut by chunks from two threads on, twelve are not.
  for (int64_t heads : {2, 12}) {
    Case c(DType::kBFloat16, heads, 2, 32, 4200, 7);
    const std::string shape = std::to_string(heads) + " heads" + where;
    for (bool with_output : {false, true}) {
      const herald::AttendCall call = c.call(threads, with_output, with_output);
      steady((with_output ? "attend_select, " : "select, ") + shape,
             [&] { herald::attend_select(call); });
    }
    const int32_t count = c.budget, start = 100;
    std::vector<char> keys(static_cast<size_t>(count * heads * c.dim * 2)), values(keys.size());
    const herald::GatherCall gather{c.dtype,
                                    {{c.storage.data(), c.rows()}},
                                    heads,
                                    c.dim,
                                    c.indices.data(),
                                    c.budget + 1,
                                    &count,
                                    keys.data(),
                                    values.data(),
                                    count,
                                    0,
                                    threads};
    steady("gather, " + shape, [&] { herald::gather(gather); });
    const herald::StoreCall store{c.dtype,     {{c.storage.data(), c.rows()}},
                                  heads,       c.dim,
                                  &start,      &count,
                                  keys.data(), values.data(),
                                  count,       threads};
    herald::RerankCall again{};
    again.dtype = c.dtype;
    again.slots = {{c.storage.data(), c.rows()}};
    again.heads = heads;
    again.group = c.group;
    again.dim = c.dim;
    again.query = c.query.data();
    again.candidates = c.indices.data();
    again.candidate_capacity = again.capacity = c.budget + 1;
    again.counts = &count;
    const int32_t half = count / 2;
    again.budget = &half;
    std::vector<int32_t> kept(c.indices.size());
    again.indices = kept.data();
    again.scale = 0.25f;
    int32_t status;
    again.status = &status;
    again.threads = threads;
    steady("rerank, " + shape, [&] { herald::rerank(again); });
    std::vector<int32_t> source(c.indices.size());
    const herald::ChangesCall changes{c.dtype,
                                      {{c.storage.data(), c.rows()}},
                                      heads,
                                      c.dim,
                                      c.indices.data(),
                                      c.budget + 1,
                                      &count,
                                      kept.data(),
                                      c.budget + 1,
                                      &half,
                                      source.data(),
                                      keys.data(),
                                      values.data(),
                                      count * heads,
                                      threads};
    steady("gather_changes, " + shape, [&] { herald::gather_changes(changes); });
    steady("store, " + shape, [&] { herald::store(store); });
  }
}

}  // namespace

int main() {
  counters();
  for (const std::string& isa : herald::available_isas()) {
    herald::choose_isa(isa);
    for (int threads : {1, 2, 3}) kernels(isa, threads);
  }
  return check::finish();
}
