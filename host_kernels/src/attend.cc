#include "attend.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <numeric>
#include <optional>

#include "arena.h"
#include "cpu_features.h"
#include "head.h"
#include "head_tasks.h"
#include "thread_pool.h"

namespace herald {
namespace {

class Runner {
 public:
  Runner(const AttendCall& call, const KernelTable& table)
      : c_(call),
        table_(table),
        query_bytes_(table.query_bytes(call.dtype, call.group, call.dim)),
        tasks_(call) {}

  // All memory of a call is the pool's scratch, which earlier calls of this size have grown.
  void run() {
    PoolLease lease(c_.threads);
    tasks_.choose_split(lease);
    Carver size(nullptr);
    carve(size);
    Carver own_size(nullptr);
    if (tasks_.split() < tasks_.units()) HeadScratch(own_size, c_, tasks_.longest(), query_bytes_);
    SelectScratch(own_size, tasks_.longest());
    lease.reserve_each(own_size.used());
    Carver carver(lease.call_scratch(size.used()));
    carve(carver);
    for (size_t slot = 0; slot < c_.slots.size(); ++slot)
      new (bad_ + slot) std::atomic<bool>(false);
    for (int64_t i = 0; i < tasks_.split(); ++i) new (missing_ + i) std::atomic<int64_t>;
    tasks_.list([&](const Unit& u, int64_t chunk) { return home(lease, u, chunk); });
    reset(lease);
    lease.run([&](int index) { work(lease, index); });
    if (tasks_.split() > 0 && scores_twice(c_)) {
      again_ = true;
      reset(lease);
      lease.run([&](int index) { work(lease, index); });
    }
    finish_status();
  }

 private:
  void carve(Carver& carver) {
    bad_ = carver.take<std::atomic<bool>>(static_cast<int64_t>(c_.slots.size()));
    tasks_.carve(carver);
    missing_ = carver.take<std::atomic<int64_t>>(tasks_.split());
    heads_ = carver.take<HeadScratch>(tasks_.split());
    for (int64_t i = 0; i < tasks_.split(); ++i) {
      const HeadScratch head(carver, c_, tasks_.longest(), query_bytes_);
      if (heads_) new (heads_ + i) HeadScratch(head);
    }
  }

  // Before every pass over the tasks.
  void reset(const PoolLease& lease) {
    for (int64_t i = 0; i < tasks_.split(); ++i) {
      const Unit& u = tasks_.split_unit(i);
      missing_[i].store(tasks_.parts(u), std::memory_order_relaxed);
      if (!again_) prepare(u, heads_[i]);
    }
    tasks_.begin(lease.homes());
  }

  // The node on which the keys of that chunk lie; rows outside every arena are spread evenly.
  int64_t home(const PoolLease& lease, const Unit& u, int64_t chunk) const {
    if (lease.homes() == 1) return 0;
    const int touched_by = owner(keys_at(u, chunk * kChunkRows));
    return touched_by >= 0 ? lease.home(touched_by) : tasks_.number(u) % lease.homes();
  }

  void work(PoolLease& lease, int index) {
    Carver own(lease.scratch_of(index));
    std::optional<HeadScratch> head;
    if (tasks_.split() < tasks_.units()) head.emplace(own, c_, tasks_.longest(), query_bytes_);
    SelectScratch select(own, tasks_.longest());
    const int home = lease.home(index);
    int64_t i = tasks_.take(home);
    Ahead ahead = i < 0 ? Ahead() : look(tasks_[i]);
    while (i >= 0) {
      const Task& task = tasks_[i];
      const Unit& u = task.unit;
      const bool split = tasks_.is_split(u);
      HeadScratch& s = split ? heads_[tasks_.place(u)] : *head;
      if (!split) prepare(u, s);
      if (again_)
        weigh(u, s, task, ahead);
      else
        scan(u, s, task, ahead);
      // What comes next is asked for while this head is selected.
      i = tasks_.take(home);
      ahead = i < 0 ? Ahead() : look(tasks_[i]);
      if (split && missing_[tasks_.place(u)].fetch_sub(1) != 1) continue;
      if (!again_) merge(u, s);
      if (!split && scores_twice(c_)) {
        Ahead anew = look(task);
        weigh(u, s, task, anew);
      }
      if (again_ || !split || !scores_twice(c_)) select_rows(u, s, select, ahead);
    }
  }

  const float* head_query(const Unit& u) const {
    return c_.query + (u.slot * c_.heads + u.head) * c_.group * c_.dim;
  }

  void prepare(const Unit& u, HeadScratch& s) {
    table_.prepare_query(c_.dtype, head_query(u), c_.group, c_.dim, s.query);
  }

  bool bad(const Unit& u) const { return bad_[u.slot].load(std::memory_order_relaxed); }
  void set_bad(const Unit& u) { bad_[u.slot].store(true, std::memory_order_relaxed); }

  // Row `row` of a head's keys, or the tile that begins there, and of its values.
  const char* keys_at(const Unit& u, int64_t row) const {
    const Extent& extent = c_.slots[static_cast<size_t>(u.slot)];
    if (is_index(c_.dtype))
      return extent.data + (u.head * extent.rows + row) / kTileRows * tile_bytes(c_.dtype, c_.dim);
    return extent.data + (2 * u.head * extent.rows + row) * c_.dim * item_size(c_.dtype);
  }
  const char* values_at(const Unit& u, int64_t row) const {
    if (!c_.output) return nullptr;
    const int64_t plane = c_.slots[static_cast<size_t>(u.slot)].rows * c_.dim * item_size(c_.dtype);
    return keys_at(u, row) + plane;
  }

  // The memory of chunks [begin, end) of a head.
  Ahead look(const Unit& u, int64_t begin, int64_t end) const {
    const int64_t row = begin * kChunkRows,
                  rows = std::min(tasks_.length(u), end * kChunkRows) - row;
    const int64_t tile = is_index(c_.dtype) ? tile_bytes(c_.dtype, c_.dim)
                                            : kTileRows * c_.dim * item_size(c_.dtype);
    return look_ahead(prefetch(), keys_at(u, row), values_at(u, row), tile, rows / kTileRows);
  }
  Ahead look(const Task& task) const { return look(task.unit, task.begin, task.end); }

  ChunkScan chunk_scan(const Unit& u, const HeadScratch& s, int64_t chunk, Ahead& ahead) const {
    ChunkScan scan = chunk_of(c_, s, chunk, tasks_.length(u), ahead);
    scan.keys = keys_at(u, 0);
    scan.values = values_at(u, 0);
    return scan;
  }

  void scan(const Unit& u, HeadScratch& s, const Task& task, Ahead& ahead) {
    ChunkScan turns[kMaxStreams];
    Ahead each[kMaxStreams];
    const int64_t streams = prefetch().streams, end = std::min(task.end, tasks_.chunks(u));
    for (int64_t chunk = task.begin; chunk < end && !bad(u);) {
      int64_t count = 0;
      for (; count < streams && chunk < end; ++count, ++chunk) {
        if (streams > 1) each[count] = look(u, chunk, chunk + 1);
        turns[count] = chunk_scan(u, s, chunk, streams > 1 ? each[count] : ahead);
      }
      if (!table_.scan_chunks(c_.dtype, turns, count)) set_bad(u);
    }
  }

  void weigh(const Unit& u, HeadScratch& s, const Task& task, Ahead& ahead) {
    const int64_t end = std::min(task.end, tasks_.chunks(u));
    for (int64_t chunk = task.begin; chunk < end && !bad(u); ++chunk)
      table_.weigh_chunk(c_.dtype, chunk_scan(u, s, chunk, ahead), s.head_maximum,
                         s.head_normaliser, s.importance);
  }

  void merge(const Unit& u, HeadScratch& s) {
    for (int64_t g = 0; g < c_.group && !bad(u); ++g)
      if (!merge_chunks(c_, table_, u.slot, u.head, g, s)) set_bad(u);
  }

  void select_rows(const Unit& u, HeadScratch& s, SelectScratch& select, Ahead& ahead) {
    if (bad(u)) return;
    HeadSelect h;
    h.weights = s.weights;
    h.exponents = s.exponents;
    h.group = c_.group;
    h.maximum = s.head_maximum;
    h.normaliser = s.head_normaliser;
    h.select_len = c_.select_len[u.slot];
    h.budget = c_.budget[u.slot];
    h.sinks = c_.sinks;
    h.recent = c_.recent;
    h.importance = s.weights ? select.importance : s.importance;
    h.histogram = select.histogram;
    h.candidates = select.candidates;
    h.indices = head_indices(u);
    h.ahead = &ahead;
    table_.select_head(h);
    std::fill(h.indices + h.budget, h.indices + c_.capacity, -1);
    if (c_.log_rest) write_rest(c_, u.slot, u.head, s);
  }

  int32_t* head_indices(const Unit& u) const {
    return c_.indices + (u.slot * c_.heads + u.head) * c_.capacity;
  }

  // A slot that met a non-finite number is no more trusted at all: zeros, and the rows that any
  // method would keep, the sinks and the most recent ones.
  void finish_status() {
    const auto slots = static_cast<int64_t>(c_.slots.size());
    const int64_t out_size = c_.heads * c_.group * c_.dim;
    for (int64_t slot = 0; slot < slots; ++slot) {
      c_.status[slot] = bad_[slot].load() ? 1 : 0;
      if (!c_.status[slot]) continue;
      if (c_.output)
        std::fill(c_.output + slot * out_size, c_.output + (slot + 1) * out_size, 0.0f);
      if (c_.log_rest)
        std::fill_n(c_.log_rest + slot * c_.heads * c_.group, c_.heads * c_.group, 0.0f);
      const int64_t budget = c_.budget[slot], first = std::min(c_.sinks, budget);
      for (int64_t head = 0; head < c_.heads; ++head) {
        int32_t* to = head_indices({slot, head});
        std::fill(to, to + c_.capacity, -1);
        std::iota(to, to + first, 0);
        std::iota(to + first, to + budget,
                  static_cast<int32_t>(c_.select_len[slot] - (budget - first)));
      }
    }
  }

  const AttendCall& c_;
  const KernelTable& table_;
  const int64_t query_bytes_;
  std::atomic<bool>* bad_ = nullptr;  // [slots]
  HeadTasks tasks_;
  // Of heads that are handed out by chunks.
  std::atomic<int64_t>* missing_ = nullptr;
  HeadScratch* heads_ = nullptr;
  bool again_ = false;
};

}  // namespace

void attend_select(const AttendCall& call) { Runner(call, active_table()).run(); }

}  // namespace herald
