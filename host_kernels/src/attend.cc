#include "attend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <numeric>
#include <optional>

#include "arena.h"
#include "cpu_features.h"
#include "home_queues.h"
#include "thread_pool.h"

namespace herald {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

// Carves arrays out of one block; with a null block it only counts.
class Carver {
 public:
  explicit Carver(void* block) : block_(static_cast<char*>(block)) {}
  template <class T>
  T* take(int64_t count) {
    char* at = block_ ? block_ + used_ : nullptr;
    used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  char* block_;
  size_t used_ = 0;
};

// Working memory of one KV head: enough for `rows` rows.
struct HeadScratch {
  HeadScratch(Carver& carver, const AttendCall& c, int64_t rows, int64_t query_bytes) {
    const int64_t padded = round_up(rows, kTileRows), chunks = (rows + kChunkRows - 1) / kChunkRows;
    const int64_t dims = c.group * round_up(c.dim, kDimPad);
    stride = padded;
    query = carver.take<char>(query_bytes);
    weights = carver.take<float>(c.group * padded);
    exponents = carver.take<float>(padded / kTileRows * c.group);
    lanes = carver.take<float>(chunks * c.group * kMaxLanes);
    maximum = carver.take<float>(chunks * c.group);
    normaliser = carver.take<float>(chunks * c.group);
    output = carver.take<float>(c.output ? chunks * dims : 0);
    head_maximum = carver.take<float>(c.group);
    head_normaliser = carver.take<float>(c.group);
    head_output = carver.take<float>(round_up(c.dim, kDimPad));
  }
  int64_t stride;
  char* query;
  float *weights, *exponents;
  float *lanes, *maximum, *normaliser, *output;         // per chunk
  float *head_maximum, *head_normaliser, *head_output;  // merged
};

// Working memory of one participant, only needed while a head is selected.
struct SelectScratch {
  SelectScratch(Carver& carver, int64_t rows) {
    importance = carver.take<float>(round_up(rows, kTileRows));
    histogram = carver.take<uint32_t>(kHistogramTables * kHistogramBins);
    candidates = carver.take<uint32_t>(rows);
  }
  float* importance;
  uint32_t *histogram, *candidates;
};

class Runner {
 public:
  Runner(const AttendCall& call, const KernelTable& table)
      : c_(call),
        table_(table),
        query_bytes_(table.query_bytes(call.dtype, call.group, call.dim)) {}

  // All memory of a call is the pool's scratch, which earlier calls of this size have grown.
  void run() {
    const auto slots = static_cast<int64_t>(c_.slots.size());
    for (int64_t slot = 0; slot < slots; ++slot)
      longest_ = std::max<int64_t>(longest_, c_.attend_len[slot]);
    PoolLease lease(c_.threads);
    // Fewer heads than the threads want: hand out chunks; whoever ends a head's last one finishes
    // it.
    const bool few = slots * c_.heads < 4 * lease.threads();
    by_chunk_ = few && lease.threads() > 1 && longest_ > kChunkRows;
    Carver size(nullptr);
    carve(size);
    Carver own_size(nullptr);
    if (!by_chunk_) HeadScratch(own_size, c_, longest_, query_bytes_);
    SelectScratch(own_size, longest_);
    lease.reserve_each(own_size.used());
    Carver carver(lease.call_scratch(size.used()));
    carve(carver);
    if (by_chunk_) prepare_heads();
    cut(lease);
    lease.run([&](int index) { work(lease, index); });
    finish_status();
  }

 private:
  struct Unit {
    int64_t slot, head;
  };
  // Chunks [begin, end) of one head.
  struct Task {
    Unit unit;
    int64_t begin, end;
    int64_t home;
  };

  int64_t length(const Unit& u) const { return c_.attend_len[u.slot]; }
  int64_t chunks(const Unit& u) const { return (length(u) + kChunkRows - 1) / kChunkRows; }
  // A head without rows still has to be finished.
  int64_t parts(const Unit& u) const { return by_chunk_ ? std::max<int64_t>(chunks(u), 1) : 1; }
  int64_t number(const Unit& u) const { return u.slot * c_.heads + u.head; }

  template <class Visit>
  void for_each_unit(const Visit& visit) const {
    for (int64_t slot = 0; slot < static_cast<int64_t>(c_.slots.size()); ++slot)
      for (int64_t head = 0; head < c_.heads; ++head) visit(Unit{slot, head});
  }

  void carve(Carver& carver) {
    const auto slots = static_cast<int64_t>(c_.slots.size()), units = slots * c_.heads;
    int64_t count = 0;
    for_each_unit([&](const Unit& u) { count += parts(u); });
    bad_ = carver.take<std::atomic<bool>>(slots);
    tasks_ = carver.take<Task>(count);
    missing_ = carver.take<std::atomic<int64_t>>(by_chunk_ ? units : 0);
    heads_ = carver.take<HeadScratch>(by_chunk_ ? units : 0);
    if (by_chunk_)
      for_each_unit([&](const Unit& u) {
        const HeadScratch head(carver, c_, length(u), query_bytes_);
        if (tasks_) new (heads_ + number(u)) HeadScratch(head);
      });
  }

  void prepare_heads() {
    for_each_unit([&](const Unit& u) {
      new (missing_ + number(u)) std::atomic<int64_t>(parts(u));
      prepare(u, heads_[number(u)]);
    });
  }

  // Tasks by home, there the longest heads first, so that the last one to finish is a short one.
  void cut(const PoolLease& lease) {
    for (size_t slot = 0; slot < c_.slots.size(); ++slot)
      new (bad_ + slot) std::atomic<bool>(false);
    int64_t count = 0;
    for_each_unit([&](const Unit& u) {
      for (int64_t part = 0; part < parts(u); ++part)
        tasks_[count++] = {u, part, by_chunk_ ? part + 1 : chunks(u), home(lease, u, part)};
    });
    std::sort(tasks_, tasks_ + count, [&](const Task& a, const Task& b) {
      if (a.home != b.home) return a.home < b.home;
      if (length(a.unit) != length(b.unit)) return length(a.unit) > length(b.unit);
      if (number(a.unit) != number(b.unit)) return number(a.unit) < number(b.unit);
      return a.begin < b.begin;
    });
    int64_t end = 0;
    for (int64_t home = 0; home < lease.homes(); ++home) {
      while (end < count && tasks_[end].home == home) ++end;
      queues_.close(static_cast<int>(home), end);
    }
  }

  // The node on which the keys of that chunk lie; rows outside every arena are spread evenly.
  int64_t home(const PoolLease& lease, const Unit& u, int64_t chunk) const {
    if (lease.homes() == 1) return 0;
    const Extent& extent = c_.slots[static_cast<size_t>(u.slot)];
    const int64_t row = chunk * kChunkRows;
    const int touched_by =
        c_.dtype == DType::kInt8Index
            ? owner(extent.data + (u.head * extent.rows + row) / kTileRows * tile_bytes(c_.dim))
            : owner(extent.data + (2 * u.head * extent.rows + row) * c_.dim * item_size(c_.dtype));
    return touched_by >= 0 ? lease.home(touched_by) : number(u) % lease.homes();
  }

  void work(PoolLease& lease, int index) {
    Carver own(lease.scratch_of(index));
    std::optional<HeadScratch> head;
    if (!by_chunk_) head.emplace(own, c_, longest_, query_bytes_);
    SelectScratch select(own, longest_);
    for (int64_t i; (i = queues_.take(lease.home(index))) >= 0;) {
      const Task& task = tasks_[i];
      const Unit& u = task.unit;
      HeadScratch& s = by_chunk_ ? heads_[number(u)] : *head;
      if (!by_chunk_) prepare(u, s);
      for (int64_t chunk = task.begin; chunk < std::min(task.end, chunks(u)); ++chunk)
        scan(u, s, chunk);
      if (!by_chunk_ || missing_[number(u)].fetch_sub(1) == 1) finish(u, s, select);
    }
  }

  const float* head_query(const Unit& u) const {
    return c_.query + (u.slot * c_.heads + u.head) * c_.group * c_.dim;
  }

  void prepare(const Unit& u, HeadScratch& s) {
    table_.prepare_query(c_.dtype, head_query(u), c_.group, c_.dim, s.query);
  }

  void scan(const Unit& u, HeadScratch& s, int64_t chunk) {
    if (bad_[u.slot].load(std::memory_order_relaxed)) return;
    const Extent& extent = c_.slots[static_cast<size_t>(u.slot)];
    ChunkScan scan;
    if (c_.dtype == DType::kInt8Index) {
      scan.keys = extent.data + u.head * (extent.rows / kTileRows) * tile_bytes(c_.dim);
      scan.values = nullptr;
    } else {
      const int64_t plane = extent.rows * c_.dim * item_size(c_.dtype);
      scan.keys = extent.data + 2 * u.head * plane;
      scan.values = c_.output ? extent.data + (2 * u.head + 1) * plane : nullptr;
    }
    scan.begin = chunk * kChunkRows;
    scan.end = std::min(length(u), scan.begin + kChunkRows);
    scan.group = c_.group;
    scan.dim = c_.dim;
    scan.query = s.query;
    scan.log2_scale = c_.scale * kLog2E;
    scan.prefetch = prefetch();
    scan.weights = s.weights;
    scan.weight_stride = s.stride;
    scan.exponents = s.exponents;
    scan.lanes = s.lanes + chunk * c_.group * kMaxLanes;
    scan.maximum = s.maximum + chunk * c_.group;
    scan.normaliser = s.normaliser + chunk * c_.group;
    scan.output = s.output + chunk * c_.group * round_up(c_.dim, kDimPad);
    if (!table_.scan_chunk(c_.dtype, scan)) bad_[u.slot].store(true, std::memory_order_relaxed);
  }

  void finish(const Unit& u, HeadScratch& s, SelectScratch& select) {
    if (bad_[u.slot].load(std::memory_order_relaxed)) return;
    for (int64_t g = 0; g < c_.group; ++g)
      if (!merge(u, s, g)) {
        bad_[u.slot].store(true, std::memory_order_relaxed);
        return;
      }
    HeadSelect h;
    h.weights = s.weights;
    h.weight_stride = s.stride;
    h.exponents = s.exponents;
    h.group = c_.group;
    h.maximum = s.head_maximum;
    h.normaliser = s.head_normaliser;
    h.select_len = c_.select_len[u.slot];
    h.budget = c_.budget[u.slot];
    h.sinks = c_.sinks;
    h.recent = c_.recent;
    h.importance = select.importance;
    h.histogram = select.histogram;
    h.candidates = select.candidates;
    h.indices = head_indices(u);
    table_.select_head(h);
    std::fill(h.indices + h.budget, h.indices + c_.capacity, -1);
  }

  int32_t* head_indices(const Unit& u) const {
    return c_.indices + (u.slot * c_.heads + u.head) * c_.capacity;
  }

  // Chunks in ascending order, then the slot's own key; the integer maxima keep rescaling exact.
  bool merge(const Unit& u, HeadScratch& s, int64_t g) {
    const int64_t count = chunks(u), padded = round_up(c_.dim, kDimPad);
    float self = 0, maximum = -INFINITY, normaliser = 0;
    for (int64_t k = 0; k < count; ++k) maximum = std::max(maximum, s.maximum[k * c_.group + g]);
    if (c_.self_key) {
      const float* key = c_.self_key + (u.slot * c_.heads + u.head) * c_.dim;
      const float* query = head_query(u) + g * c_.dim;
      self = table_.single_score(c_.dtype, query, key, c_.dim) * (c_.scale * kLog2E);
      if (!std::isfinite(self)) return false;
      maximum = std::max(maximum, std::nearbyint(self));
    }
    float outside = -INFINITY;
    if (c_.elsewhere) {
      outside = c_.elsewhere[(u.slot * c_.heads + u.head) * c_.group + g] * kLog2E;
      if (std::isnan(outside) || outside == INFINITY) return false;
      maximum = std::max(maximum, std::nearbyint(outside));
    }
    float* total = s.head_output;
    std::fill(total, total + padded, 0.0f);
    for (int64_t k = 0; k < count; ++k) {
      const float factor = power_of_two(s.maximum[k * c_.group + g] - maximum);
      normaliser += s.normaliser[k * c_.group + g] * factor;
      const float* part = s.output + (k * c_.group + g) * padded;
      for (int64_t d = 0; c_.output && d < padded; ++d) total[d] += part[d] * factor;
    }
    const float self_weight = c_.self_key ? std::exp2(self - maximum) : 0.0f;
    normaliser += self_weight;
    if (outside > -INFINITY) normaliser += std::exp2(outside - maximum);
    if (c_.log_total)
      c_.log_total[(u.slot * c_.heads + u.head) * c_.group + g] =
          (maximum + std::log2(normaliser)) / kLog2E;
    s.head_maximum[g] = maximum;
    s.head_normaliser[g] = normaliser;
    if (!c_.output) return true;
    float* natural = c_.output + ((u.slot * c_.heads + u.head) * c_.group + g) * c_.dim;
    const float inverse = normaliser > 0 ? 1 / normaliser : 0.0f;
    table_.unpack_output(c_.dtype, total, c_.dim, inverse, natural);
    bool finite = true;
    for (int64_t d = 0; d < c_.dim; ++d) {
      if (c_.self_key)
        natural[d] +=
            c_.self_value[(u.slot * c_.heads + u.head) * c_.dim + d] * self_weight * inverse;
      finite &= std::isfinite(natural[d]);
    }
    return finite;
  }

  static float power_of_two(float n) {
    return n >= -126 ? std::ldexp(1.0f, static_cast<int>(n)) : 0.0f;
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
      if (c_.log_total)
        std::fill_n(c_.log_total + slot * c_.heads * c_.group, c_.heads * c_.group, 0.0f);
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
  Task* tasks_ = nullptr;
  HomeQueues queues_;
  // Per unit, where heads are cut by chunks.
  std::atomic<int64_t>* missing_ = nullptr;
  HeadScratch* heads_ = nullptr;
  int64_t longest_ = 0;
  bool by_chunk_ = false;
};

}  // namespace

void attend_select(const AttendCall& call) { Runner(call, active_table()).run(); }

}  // namespace herald
