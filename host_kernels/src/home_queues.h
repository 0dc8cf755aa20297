// Hands out tasks that lie on NUMA nodes: a participant takes those of its own node first, in
// order, then what is left of the others'.
#pragma once

#include <atomic>
#include <cstdint>

namespace herald {

class HomeQueues {
 public:
  static constexpr int kMaxHomes = 64;

  // Tasks are numbered by home: after these calls, home h has ends[h - 1] to ends[h]. Home 0
  // begins anew.
  void close(int home, int64_t end) {
    if (home == 0) homes_ = 0;
    queues_[home].next.store(homes_ ? queues_[homes_ - 1].end : 0, std::memory_order_relaxed);
    queues_[home].end = end;
    homes_ = home + 1;
  }

  // The next task for a participant of this home, or -1 when all have been handed out.
  int64_t take(int home) {
    for (int i = 0; i < homes_; ++i) {
      Queue& queue = queues_[(home + i) % homes_];
      if (queue.next.load(std::memory_order_relaxed) >= queue.end) continue;
      const int64_t task = queue.next.fetch_add(1, std::memory_order_relaxed);
      if (task < queue.end) return task;
    }
    return -1;
  }

 private:
  struct alignas(64) Queue {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  Queue queues_[kMaxHomes];
  int homes_ = 0;
};

}  // namespace herald
