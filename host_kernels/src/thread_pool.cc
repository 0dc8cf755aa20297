#include "thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace herald {

struct PoolState {
  explicit PoolState(pid_t owner) : pid(owner) {}

  const pid_t pid;

  // Who may use the pool: tickets are served in order.
  std::mutex gate;
  std::condition_variable gate_moved;
  uint64_t next_ticket = 0, now_serving = 0;

  // What the workers do. The job's fields change only under `mutex`, between two generations.
  std::mutex mutex;
  std::condition_variable job_posted, job_finished;
  std::atomic<uint64_t> generation{0};
  std::atomic<int> unfinished{0};
  void (*work)(const void*, int) = nullptr;
  const void* context = nullptr;
  int participants = 0;

  // Touched by the lease holder only.
  int workers = 0;
  struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;
  };
  std::vector<Buffer> buffers;
};

namespace {

// Work often comes in quick succession; a park and wake-up costs more than a short look.
constexpr auto kSpin = std::chrono::microseconds(20);

template <class Ready>
bool spin_until(const Ready& ready) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  while (!ready()) {
    for (int i = 0; i < 16; ++i) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    if (std::chrono::steady_clock::now() > deadline) return ready();
  }
  return true;
}

void worker_loop(PoolState* s, int index, uint64_t seen) {
  for (;;) {
    const auto posted = [&] { return s->generation.load(std::memory_order_acquire) != seen; };
    spin_until(posted);
    std::unique_lock<std::mutex> lock(s->mutex);
    s->job_posted.wait(lock, posted);
    seen = s->generation.load(std::memory_order_relaxed);
    if (index >= s->participants) continue;
    const auto work = s->work;
    const void* context = s->context;
    lock.unlock();
    work(context, index);
    if (s->unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard<std::mutex> finished(s->mutex);
      s->job_finished.notify_one();
    }
  }
}

// The pool is never destroyed: its workers may outlive static destructors, and a child process
// cannot touch the mutexes it inherited, so it starts a pool of its own and leaves the old one be.
PoolState* current_pool() {
  static std::atomic<PoolState*> pool{nullptr};
  PoolState* state = pool.load(std::memory_order_acquire);
  const pid_t pid = getpid();
  if (state && state->pid == pid) return state;
  auto* fresh = new PoolState(pid);
  if (pool.compare_exchange_strong(state, fresh, std::memory_order_acq_rel)) return fresh;
  delete fresh;
  return state;
}

// Returns how many workers exist, at most `wanted` being added up to.
int grow(PoolState* s, int wanted) {
  while (s->workers < wanted) {
    try {
      std::thread(worker_loop, s, s->workers + 1, s->generation.load()).detach();
    } catch (const std::system_error&) {
      break;
    }
    ++s->workers;
  }
  return s->workers < wanted ? s->workers : wanted;
}

}  // namespace

PoolLease::PoolLease(int threads) : state_(current_pool()), threads_(1) {
  {
    std::unique_lock<std::mutex> lock(state_->gate);
    const uint64_t ticket = state_->next_ticket++;
    state_->gate_moved.wait(lock, [&] { return state_->now_serving == ticket; });
  }
  if (threads > 1) threads_ = 1 + grow(state_, threads - 1);
}

PoolLease::~PoolLease() {
  {
    std::lock_guard<std::mutex> lock(state_->gate);
    ++state_->now_serving;
  }
  state_->gate_moved.notify_all();
}

void PoolLease::run_raw(RawWork work, const void* context) {
  PoolState* s = state_;
  if (threads_ == 1) return work(context, 0);
  {
    std::lock_guard<std::mutex> lock(s->mutex);
    s->work = work;
    s->context = context;
    s->participants = threads_;
    s->unfinished.store(threads_ - 1, std::memory_order_relaxed);
    s->generation.fetch_add(1, std::memory_order_release);
  }
  s->job_posted.notify_all();
  work(context, 0);
  const auto done = [&] { return s->unfinished.load(std::memory_order_acquire) == 0; };
  if (spin_until(done)) return;
  std::unique_lock<std::mutex> lock(s->mutex);
  s->job_finished.wait(lock, done);
}

void* PoolLease::scratch(int slot, size_t bytes) {
  auto& buffers = state_->buffers;
  if (buffers.size() <= static_cast<size_t>(slot)) buffers.resize(static_cast<size_t>(slot) + 1);
  auto& buffer = buffers[static_cast<size_t>(slot)];
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer = {};
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, rounded);
    if (!buffer.data) throw std::bad_alloc();
    buffer.bytes = rounded;
  }
  return buffer.data;
}

}  // namespace herald
