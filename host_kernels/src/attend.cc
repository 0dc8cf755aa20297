#include "attend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>

#include "carver.h"
#include "cpu_features.h"
#include "thread_pool.h"

namespace herald {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

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
        query_bytes_(table.query_bytes(call.dtype, call.group, call.dim)),
        bad_(new std::atomic<bool>[call.slots.size()]()) {}

  void run() {
    const auto slots = static_cast<int64_t>(c_.slots.size());
    std::vector<int64_t> order(static_cast<size_t>(slots));
    std::iota(order.begin(), order.end(), 0);
    // Longest first, so that the last unit to finish is a short one.
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return c_.attend_len[a] > c_.attend_len[b]; });
    units_.reserve(static_cast<size_t>(slots * c_.heads));
    for (int64_t slot : order)
      for (int64_t head = 0; head < c_.heads; ++head) units_.push_back({slot, head});
    if (!units_.empty()) {
      longest_ = c_.attend_len[order[0]];
      PoolLease lease(c_.threads);
      const bool few = static_cast<int64_t>(units_.size()) < 4 * lease.threads();
      if (few && lease.threads() > 1 && longest_ > kChunkRows)
        run_by_chunk(lease);
      else
        run_by_head(lease);
    }
    finish_status();
  }

 private:
  struct Unit {
    int64_t slot, head;
  };

  int64_t length(const Unit& u) const { return c_.attend_len[u.slot]; }
  int64_t chunks(const Unit& u) const { return (length(u) + kChunkRows - 1) / kChunkRows; }

  void run_by_head(PoolLease& lease) {
    struct Own {
      HeadScratch head;
      SelectScratch select;
      Own(Carver& carver, const AttendCall& c, int64_t rows, int64_t query_bytes)
          : head(carver, c, rows, query_bytes), select(carver, rows) {}
    };
    Carver size(nullptr);
    Own(size, c_, longest_, query_bytes_);
    for (int i = 0; i < lease.threads(); ++i) blocks_.push_back(lease.scratch(i, size.used()));
    std::atomic<size_t> next{0};
    lease.run([&](int index) {
      Carver carver(blocks_[static_cast<size_t>(index)]);
      Own own(carver, c_, longest_, query_bytes_);
      for (size_t i; (i = next.fetch_add(1)) < units_.size();) {
        const Unit& u = units_[i];
        prepare(u, own.head);
        for (int64_t chunk = 0; chunk < chunks(u); ++chunk) scan(u, own.head, chunk);
        finish(u, own.head, own.select);
      }
    });
  }

  // Fewer heads than the threads want: hand out chunks; whoever ends a head's last one finishes it.
  void run_by_chunk(PoolLease& lease) {
    struct Part {
      size_t unit;
      int64_t chunk;
    };
    std::vector<Part> parts;
    std::vector<HeadScratch> heads;
    Carver size(nullptr);
    for (const Unit& u : units_) HeadScratch(size, c_, length(u), query_bytes_);
    Carver carver(lease.scratch(lease.threads(), size.used()));
    std::unique_ptr<std::atomic<int64_t>[]> missing(new std::atomic<int64_t>[units_.size()]);
    for (size_t i = 0; i < units_.size(); ++i) {
      heads.emplace_back(carver, c_, length(units_[i]), query_bytes_);
      prepare(units_[i], heads.back());
      // A head without rows still has to be finished.
      const int64_t count = std::max<int64_t>(chunks(units_[i]), 1);
      missing[i] = count;
      for (int64_t chunk = 0; chunk < count; ++chunk) parts.push_back({i, chunk});
    }
    Carver select_size(nullptr);
    SelectScratch(select_size, longest_);
    for (int i = 0; i < lease.threads(); ++i)
      blocks_.push_back(lease.scratch(i, select_size.used()));
    std::atomic<size_t> next{0};
    lease.run([&](int index) {
      Carver own(blocks_[static_cast<size_t>(index)]);
      SelectScratch select(own, longest_);
      for (size_t i; (i = next.fetch_add(1)) < parts.size();) {
        const Part& part = parts[i];
        const Unit& u = units_[part.unit];
        if (part.chunk < chunks(u)) scan(u, heads[part.unit], part.chunk);
        if (missing[part.unit].fetch_sub(1) == 1) finish(u, heads[part.unit], select);
      }
    });
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
  std::unique_ptr<std::atomic<bool>[]> bad_;
  std::vector<Unit> units_;
  std::vector<void*> blocks_;
  int64_t longest_ = 0;
};

}  // namespace

void attend_select(const AttendCall& call) { Runner(call, active_table()).run(); }

}  // namespace herald
