#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "numa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace herald {
namespace {

// Work often comes in quick succession; a park and wake-up costs more than a short look.
constexpr auto kSpin = std::chrono::microseconds(20);
// What the deepest kernel uses of a worker's stack, with room to spare.
constexpr size_t kStackBytes = size_t{128} << 10;

// A number that one thread waits for and others change: a short spin, then sleep in the kernel.
// No lock is involved, so there is none to contend for.
class Gauge {
 public:
  uint32_t load() const { return value_.load(std::memory_order_acquire); }
  // While nobody waits.
  void set(uint32_t value) { value_.store(value, std::memory_order_release); }
  // Sequentially consistent, like the waiter's steps: either we see the waiter asleep, or the
  // waiter sees the new value.
  uint32_t add(uint32_t amount) {
    const uint32_t before = value_.fetch_add(amount, std::memory_order_seq_cst);
    return before + amount;
  }
  void wake() {
    if (asleep_.load(std::memory_order_seq_cst)) call(FUTEX_WAKE_PRIVATE, 1);
  }

  template <class Ready>
  void wait(const Ready& ready) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (!ready(load())) {
      for (int i = 0; i < 16; ++i) {
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
      if (std::chrono::steady_clock::now() > deadline) return sleep(ready);
    }
  }

 private:
  template <class Ready>
  void sleep(const Ready& ready) {
    asleep_.store(true, std::memory_order_seq_cst);
    for (uint32_t seen; !ready(seen = value_.load(std::memory_order_seq_cst));)
      call(FUTEX_WAIT_PRIVATE, seen);
    asleep_.store(false, std::memory_order_relaxed);
  }
  void call(int operation, uint32_t value) {
    static_assert(sizeof value_ == sizeof(uint32_t), "the kernel looks at 32 bits");
    syscall(SYS_futex, &value_, operation, value, nullptr, nullptr, 0);
  }

  std::atomic<uint32_t> value_{0};
  std::atomic<bool> asleep_{false};
};

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  size_t touched = 0;

  void grow(size_t wanted) {
    if (bytes >= wanted) return;
    std::free(data);
    *this = {};
    const size_t rounded = (wanted + 4095) / 4096 * 4096;
    data = std::aligned_alloc(4096, rounded);
    if (!data) throw std::bad_alloc();
    bytes = rounded;
  }
  void touch() {
    if (touched < bytes) std::memset(data, 0, bytes);
    touched = bytes;
  }
};

// What belongs to one participant; a line of its own, so that nobody waits for a neighbour's.
struct alignas(64) Participant {
  Gauge posted;  // counts the jobs that this worker has been given
  Buffer scratch;
};

}  // namespace

struct PoolState {
  PoolState(pid_t owner, PoolUse use_) : pid(owner), use(use_) {}

  const pid_t pid;
  const PoolUse use;

  // Who may use the pool: tickets are served in order.
  std::mutex gate;
  std::condition_variable gate_moved;
  uint64_t next_ticket = 0, now_serving = 0;

  // The job; written by the lease holder before it posts, read by workers after.
  void (*work)(const void*, int) = nullptr;
  const void* context = nullptr;
  Gauge unfinished;

  // Touched by the lease holder only. Participant 0 is the caller; workers keep pointers.
  std::vector<std::unique_ptr<Participant>> participants;
  int workers = 0;
  Buffer call;
};

namespace {

std::atomic<bool> background_wanted{false};

// A thread that wakes up takes the core from one that idles at once, where it would wait for the
// end of a slice of any other, however nice.
void schedule_self(bool background) {
  const sched_param none{};
  sched_setscheduler(0, background ? SCHED_IDLE : SCHED_OTHER, &none);
}

// Pages of the stack that a first job would otherwise fault in, whenever that job comes.
__attribute__((noinline)) void touch_stack() {
  char pages[kStackBytes];
  for (size_t at = 0; at < kStackBytes; at += 4096) static_cast<volatile char*>(pages)[at] = 0;
}

void worker_loop(PoolState* s, int index, Participant* self) {
  char name[16];
  std::snprintf(name, sizeof name, "herald-%s%d", s->use == PoolUse::kMove ? "m" : "", index);
  pthread_setname_np(pthread_self(), name);
  if (nodes().size() > 1) bind_to(nodes()[static_cast<size_t>(index) % nodes().size()]);
  touch_stack();
  bool background = false;
  for (uint32_t seen = 0;; ++seen) {
    self->posted.wait([&](uint32_t posted) { return posted != seen; });
    if (background != background_wanted.load(std::memory_order_relaxed))
      schedule_self(background = !background);
    s->work(s->context, index);
    if (s->unfinished.add(UINT_MAX) == 0) s->unfinished.wake();
  }
}

// The pool is never destroyed: its workers may outlive static destructors, and a child process
// cannot touch the mutexes it inherited, so it starts a pool of its own and leaves the old one be.
PoolState* current_pool(PoolUse use) {
  static std::atomic<PoolState*> pools[2] = {};
  std::atomic<PoolState*>& pool = pools[static_cast<int>(use)];
  PoolState* state = pool.load(std::memory_order_acquire);
  const pid_t pid = getpid();
  if (state && state->pid == pid) return state;
  auto* fresh = new PoolState(pid, use);
  if (pool.compare_exchange_strong(state, fresh, std::memory_order_acq_rel)) return fresh;
  delete fresh;
  return state;
}

Participant* participant(PoolState* s, int index) {
  while (s->participants.size() <= static_cast<size_t>(index))
    s->participants.push_back(std::make_unique<Participant>());
  return s->participants[static_cast<size_t>(index)].get();
}

// Returns how many workers exist, at most `wanted` being added up to.
int grow(PoolState* s, int wanted) {
  while (s->workers < wanted) {
    const int index = s->workers + 1;
    try {
      std::thread(worker_loop, s, index, participant(s, index)).detach();
    } catch (const std::system_error&) {
      break;
    }
    ++s->workers;
  }
  return s->workers < wanted ? s->workers : wanted;
}

void open_gate(PoolState* s) {
  {
    std::lock_guard<std::mutex> lock(s->gate);
    ++s->now_serving;
  }
  s->gate_moved.notify_all();
}

}  // namespace

void set_background(bool on) { background_wanted.store(on, std::memory_order_relaxed); }

PoolLease::PoolLease(int threads, PoolUse use) : state_(current_pool(use)), threads_(1) {
  {
    std::unique_lock<std::mutex> lock(state_->gate);
    const uint64_t ticket = state_->next_ticket++;
    state_->gate_moved.wait(lock, [&] { return state_->now_serving == ticket; });
  }
  try {
    participant(state_, 0);
    if (threads > 1) threads_ = 1 + grow(state_, threads - 1);
  } catch (...) {
    open_gate(state_);
    throw;
  }
}

PoolLease::~PoolLease() { open_gate(state_); }

void PoolLease::run_raw(RawWork work, const void* context) {
  PoolState* s = state_;
  if (threads_ == 1) return work(context, 0);
  s->work = work;
  s->context = context;
  s->unfinished.set(static_cast<uint32_t>(threads_ - 1));
  // Only those that take part are woken, each by a number of its own.
  for (int i = 1; i < threads_; ++i) {
    Gauge& posted = s->participants[static_cast<size_t>(i)]->posted;
    posted.add(1);
    posted.wake();
  }
  work(context, 0);
  s->unfinished.wait([](uint32_t left) { return left == 0; });
}

void* PoolLease::call_scratch(size_t bytes) {
  state_->call.grow(bytes);
  state_->call.touch();
  return state_->call.data;
}

void PoolLease::reserve_each(size_t bytes) {
  bool grown = false;
  for (int i = 0; i < threads_; ++i) {
    Buffer& own = participant(state_, i)->scratch;
    own.grow(bytes);
    grown |= own.touched < own.bytes;
  }
  if (grown)
    run([&](int index) { state_->participants[static_cast<size_t>(index)]->scratch.touch(); });
}

void* PoolLease::scratch_of(int participant_index) {
  return state_->participants[static_cast<size_t>(participant_index)]->scratch.data;
}

int PoolLease::homes() const { return static_cast<int>(nodes().size()); }

}  // namespace herald
