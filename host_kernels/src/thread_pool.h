// One pool of worker threads for the process, parked between calls.
#pragma once

#include <cstddef>
#include <cstdint>

namespace herald {

struct PoolState;

// Exclusive use of the pool for one call. Several threads may ask at once: they are served in the
// order in which they came. A child process gets a pool of its own.
class PoolLease {
 public:
  // `threads` participants, the caller among them. Fewer take part if the system refuses threads.
  explicit PoolLease(int threads);
  ~PoolLease();
  PoolLease(const PoolLease&) = delete;
  PoolLease& operator=(const PoolLease&) = delete;

  int threads() const { return threads_; }

  // Calls work(index) once on every participant and waits for all. `work` must not throw.
  template <class Work>
  void run(const Work& work) {
    run_raw([](const void* context, int index) { (*static_cast<const Work*>(context))(index); },
            &work);
  }

  // Scratch memory `slot`, 64-byte aligned, at least `bytes`; kept for later calls, contents
  // undefined. Slots 0..threads-1 belong to the participants by custom, further ones to the call.
  // Throws std::bad_alloc.
  void* scratch(int slot, size_t bytes);

 private:
  using RawWork = void (*)(const void* context, int index);
  void run_raw(RawWork work, const void* context);

  PoolState* state_;
  int threads_;
};

}  // namespace herald
