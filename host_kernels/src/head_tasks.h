// The heads of a scan as tasks for the participants of a pool.
#pragma once

#include <algorithm>
#include <cstdint>

#include "carver.h"
#include "head.h"
#include "home_queues.h"
#include "thread_pool.h"

namespace herald {

struct Unit {
  int64_t slot, head;
};

// Chunks [begin, end) of one head.
struct Task {
  Unit unit;
  int64_t begin, end;
  int64_t home;
};

class HeadTasks {
 public:
  explicit HeadTasks(const AttendCall& call) : c_(call) {
    for (size_t slot = 0; slot < c_.slots.size(); ++slot)
      longest_ = std::max<int64_t>(longest_, c_.attend_len[slot]);
  }

  // How many heads, the shortest ones, are handed out by chunks; whoever ends a head's last one
  // finishes it. With fewer heads than the threads want these are all of them; else those that
  // would keep some threads busy while the others have nothing left. No more than that: the weights
  // of heads that are all scanned at once have left the caches when they are selected (1.15 times
  // as long at 65,536 rows).
  void choose_split(const PoolLease& lease) {
    const int64_t threads = lease.threads(), rest = units() % threads;
    if (threads == 1 || longest_ <= kChunkRows) return;
    if (units() < 2 * threads)
      split_ = units();
    else if (lease.homes() == 1 && !scores_twice(c_) && 2 * rest <= threads)
      split_ = rest;
  }

  void carve(Carver& carver) {
    const int64_t most = (longest_ + kChunkRows - 1) / kChunkRows;
    order_ = carver.take<Unit>(units());
    place_ = carver.take<int64_t>(units());
    tasks_ = carver.take<Task>(units() + split_ * std::max<int64_t>(most, 1));
  }

  // Lists tasks by their home(unit, chunk), there the longest heads first, so that the last ones to
  // finish are short ones, and chunks of heads after whole heads.
  template <class Home>
  void list(const Home& home) {
    int64_t count = 0;
    for (int64_t slot = 0; slot < static_cast<int64_t>(c_.slots.size()); ++slot)
      for (int64_t head = 0; head < c_.heads; ++head) order_[count++] = {slot, head};
    std::sort(order_, order_ + count, [&](const Unit& a, const Unit& b) {
      return length(a) != length(b) ? length(a) > length(b) : number(a) < number(b);
    });
    count_ = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Unit& u = order_[i];
      place_[number(u)] = i - (count - split_);
      const int64_t pieces = is_split(u) ? parts(u) : 1;
      for (int64_t part = 0; part < pieces; ++part)
        tasks_[count_++] = {u, part, is_split(u) ? part + 1 : chunks(u), home(u, part)};
    }
    std::sort(tasks_, tasks_ + count_, [&](const Task& a, const Task& b) {
      if (a.home != b.home) return a.home < b.home;
      const int64_t first = place(a.unit), second = place(b.unit);
      return first != second ? first < second : a.begin < b.begin;
    });
  }

  // Before every pass over the tasks.
  void begin(int homes) {
    int64_t end = 0;
    for (int64_t home = 0; home < homes; ++home) {
      while (end < count_ && tasks_[end].home == home) ++end;
      queues_.close(static_cast<int>(home), end);
    }
  }

  // The number of the next task for a participant of this home, or -1.
  int64_t take(int home) { return queues_.take(home); }
  const Task& operator[](int64_t task) const { return tasks_[task]; }

  int64_t units() const { return static_cast<int64_t>(c_.slots.size()) * c_.heads; }
  int64_t split() const { return split_; }
  const Unit& split_unit(int64_t place) const { return order_[units() - split_ + place]; }
  // Its place among the heads that are handed out by chunks; negative for whole ones.
  int64_t place(const Unit& u) const { return place_[number(u)]; }
  bool is_split(const Unit& u) const { return place(u) >= 0; }

  int64_t longest() const { return longest_; }
  int64_t length(const Unit& u) const { return c_.attend_len[u.slot]; }
  int64_t chunks(const Unit& u) const { return (length(u) + kChunkRows - 1) / kChunkRows; }
  // A head without rows still has to be finished.
  int64_t parts(const Unit& u) const { return std::max<int64_t>(chunks(u), 1); }
  int64_t number(const Unit& u) const { return u.slot * c_.heads + u.head; }

 private:
  const AttendCall& c_;
  int64_t longest_ = 0, split_ = 0, count_ = 0;
  Unit* order_ = nullptr;     // longest first; the last `split_` are handed out by chunks
  int64_t* place_ = nullptr;  // by number
  Task* tasks_ = nullptr;
  HomeQueues queues_;
};

}  // namespace herald
