// The worker threads of the process, parked between calls: one pool for scans and one for moving
// rows, so that what one caller gathers overlaps what another scans. The first is bound by the rate
// of memory, the second by its latency; together they use both.
#pragma once

#include <cstddef>
#include <cstdint>

namespace herald {

struct PoolState;

enum class PoolUse { kScan, kMove };

// Whether workers run only on cores that no other thread wants at the moment. Each obeys with its
// next job, as far as the system lets it.
void set_background(bool on);

// Exclusive use of a pool for one call. Several threads may ask at once: they are served in the
// order in which they came. A child process gets a pool of its own.
class PoolLease {
 public:
  // `threads` participants, the caller among them. Fewer take part if the system refuses threads.
  explicit PoolLease(int threads, PoolUse use = PoolUse::kScan);
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

  // Scratch memory, page-aligned, kept for later calls, contents undefined; its pages are there
  // already, so a call that asks for no more than an earlier one neither allocates nor faults.
  // Valid until the lease asks for more of the same kind. All throw std::bad_alloc.
  //
  // One block for the call.
  void* call_scratch(size_t bytes);
  // One block a participant, each touched by the participant that will use it.
  void reserve_each(size_t bytes);
  void* scratch_of(int participant);

  // Participants spread over the NUMA nodes: the home of each is a node, whose CPUs it keeps to
  // (all but the caller, whose thread is not ours to bind). One home on machines with one node.
  int homes() const;
  int home(int participant) const { return participant % homes(); }

 private:
  using RawWork = void (*)(const void* context, int index);
  void run_raw(RawWork work, const void* context);

  PoolState* state_;
  int threads_;
};

}  // namespace herald
