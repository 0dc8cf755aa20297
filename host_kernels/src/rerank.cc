#include "rerank.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>

#include "cpu_features.h"
#include "head.h"
#include "thread_pool.h"

namespace herald {
namespace {

// Working memory of one participant, for up to `rows` candidates.
struct Scratch {
  Scratch(Carver& carver, const RerankCall& c, int64_t rows, int64_t query_bytes)
      : select(carver, rows) {
    const int64_t padded = round_up(rows, kTileRows);
    keys = carver.take<char>(rows * c.dim * item_size(c.dtype));
    query = carver.take<char>(query_bytes);
    weights = carver.take<float>(c.group * padded);
    exponents = carver.take<float>(padded / kTileRows * c.group);
    lanes = carver.take<float>(c.group * kMaxLanes);
    maximum = carver.take<float>(c.group);
    normaliser = carver.take<float>(c.group);
  }
  SelectScratch select;
  char *keys, *query;
  float *weights, *exponents, *lanes, *maximum, *normaliser;
};

// False where a score is not finite. The candidates' keys are laid side by side and scanned like
// the rows of a short head, in one chunk.
bool rerank_head(const RerankCall& c, const KernelTable& table, int64_t slot, int64_t head,
                 Scratch& s) {
  const Extent& extent = c.slots[static_cast<size_t>(slot)];
  const int64_t count = c.counts[slot], unit = slot * c.heads + head;
  const int64_t bytes = c.dim * item_size(c.dtype);
  const int32_t* rows = c.candidates + unit * c.candidate_capacity;
  int32_t* indices = c.indices + unit * c.capacity;
  std::fill(indices, indices + c.capacity, -1);
  if (count == 0) return true;
  const char* keys = extent.data + 2 * head * extent.rows * bytes;
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count)
      for (int64_t b = 0; b < bytes; b += 64)
        __builtin_prefetch(keys + rows[i + kAhead] * bytes + b);
    std::memcpy(s.keys + i * bytes, keys + rows[i] * bytes, static_cast<size_t>(bytes));
  }
  table.prepare_query(c.dtype, c.query + unit * c.group * c.dim, c.group, c.dim, s.query);
  Ahead nothing;  // the keys are in the caches already
  ChunkScan scan{};
  scan.ahead = &nothing;
  scan.keys = s.keys;
  scan.end = count;
  scan.group = c.group;
  scan.dim = c.dim;
  scan.query = s.query;
  scan.log2_scale = c.scale * kLog2E;
  scan.weights = s.weights;
  scan.exponents = s.exponents;
  scan.lanes = s.lanes;
  scan.maximum = s.maximum;
  scan.normaliser = s.normaliser;
  if (!table.scan_chunks(c.dtype, &scan, 1)) return false;
  for (int64_t g = 0; c.elsewhere && g < c.group; ++g) {
    const float outside = c.elsewhere[unit * c.group + g] * kLog2E;
    if (std::isnan(outside) || outside == INFINITY) return false;
    // Where nearly all mass lies elsewhere, the candidates' own maximum says little.
    const float most = std::max(s.maximum[g], std::nearbyint(outside));
    s.normaliser[g] = s.normaliser[g] * std::exp2(s.maximum[g] - most) + std::exp2(outside - most);
    s.maximum[g] = most;
  }
  HeadSelect h{};
  h.weights = s.weights;
  h.exponents = s.exponents;
  h.group = c.group;
  h.maximum = s.maximum;
  h.normaliser = s.normaliser;
  h.select_len = count;
  h.budget = c.budget[slot];
  h.sinks = c.sinks;
  h.recent = c.recent;
  h.importance = s.select.importance;
  h.histogram = s.select.histogram;
  h.candidates = s.select.candidates;
  h.indices = indices;
  h.ahead = &nothing;
  table.select_head(h);
  for (int64_t j = 0; j < h.budget; ++j) indices[j] = rows[indices[j]];
  return true;
}

}  // namespace

void rerank(const RerankCall& c) {
  const KernelTable& table = active_table();
  const auto slots = static_cast<int64_t>(c.slots.size()), units = slots * c.heads;
  const int64_t query_bytes = table.query_bytes(c.dtype, c.group, c.dim);
  int64_t longest = 0;
  for (int64_t slot = 0; slot < slots; ++slot) longest = std::max<int64_t>(longest, c.counts[slot]);
  Carver size(nullptr);
  Scratch(size, c, longest, query_bytes);
  PoolLease lease(static_cast<int>(std::clamp<int64_t>(units, 1, c.threads)));
  auto* bad = static_cast<std::atomic<bool>*>(
      lease.call_scratch(static_cast<size_t>(slots) * sizeof(std::atomic<bool>)));
  for (int64_t slot = 0; slot < slots; ++slot) new (bad + slot) std::atomic<bool>(false);
  lease.reserve_each(size.used());
  for_each_head(
      lease, slots, c.heads, bad,
      [&](Carver& carver) { return Scratch(carver, c, longest, query_bytes); },
      [&](int64_t slot, int64_t head, Scratch& scratch) {
        return rerank_head(c, table, slot, head, scratch);
      });
  for (int64_t slot = 0; slot < slots; ++slot) {
    c.status[slot] = bad[slot].load() ? 1 : 0;
    if (!c.status[slot]) continue;
    const int64_t budget = c.budget[slot], first = std::min(c.sinks, budget);
    for (int64_t head = 0; head < c.heads; ++head) {
      const int32_t* rows = c.candidates + (slot * c.heads + head) * c.candidate_capacity;
      int32_t* to = c.indices + (slot * c.heads + head) * c.capacity;
      std::copy(rows, rows + first, to);
      std::copy(rows + c.counts[slot] - (budget - first), rows + c.counts[slot], to + first);
      std::fill(to + budget, to + c.capacity, -1);
    }
  }
}

void top_k(const float* values, int64_t rows, int64_t count, int32_t* indices) {
  PoolLease lease(1);
  Carver size(nullptr);
  SelectScratch(size, rows);
  Carver carver(lease.call_scratch(size.used()));
  const SelectScratch scratch(carver, rows);
  Ahead nothing;
  HeadSelect h{};
  h.importance = scratch.importance;
  h.histogram = scratch.histogram;
  h.candidates = scratch.candidates;
  h.ahead = &nothing;
  h.select_len = rows;
  h.budget = count;
  h.indices = indices;
  // -0 + 0 is +0, whose bits are the smallest.
  for (int64_t i = 0; i < rows; ++i) h.importance[i] = values[i] + 0.0f;
  active_table().select_head(h);
}

}  // namespace herald
