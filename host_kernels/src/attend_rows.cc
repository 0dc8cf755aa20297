#include "attend_rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "cpu_features.h"
#include "head.h"
#include "thread_pool.h"

namespace herald {
namespace {

// Working memory of one participant: a head's rows side by side, and what attending them takes.
struct Scratch {
  Scratch(Carver& carver, const AttendRowsCall& c, const AttendCall& head, int64_t rows,
          int64_t query_bytes)
      : keys(carver.take<char>(rows * c.dim * item_size(c.dtype))),
        values(carver.take<char>(rows * c.dim * item_size(c.dtype))),
        attended(carver, head, rows, query_bytes) {}
  char *keys, *values;
  HeadScratch attended;
};

// Lays the rows that a head attends side by side; returns how many there are.
int64_t collect(const AttendRowsCall& c, int64_t slot, int64_t head, Scratch& s) {
  const Extent& extent = c.slots[static_cast<size_t>(slot)];
  const int64_t bytes = c.dim * item_size(c.dtype), count = c.counts[slot];
  const char* keys = extent.data + 2 * head * extent.rows * bytes;
  const char* values = keys + extent.rows * bytes;
  const int32_t* rows = c.indices + (slot * c.heads + head) * c.capacity;
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count)
      for (int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(keys + rows[i + kAhead] * bytes + b);
        __builtin_prefetch(values + rows[i + kAhead] * bytes + b);
      }
    std::memcpy(s.keys + i * bytes, keys + rows[i] * bytes, static_cast<size_t>(bytes));
    std::memcpy(s.values + i * bytes, values + rows[i] * bytes, static_cast<size_t>(bytes));
  }
  const int64_t begin = c.tail_begin[slot], tail = c.tail_end[slot] - begin;
  if (tail > 0) {
    const auto size = static_cast<size_t>(tail * bytes);
    std::memcpy(s.keys + count * bytes, keys + begin * bytes, size);
    std::memcpy(s.values + count * bytes, values + begin * bytes, size);
  }
  return count + tail;
}

// False where a score or an output is not finite. `call` says that each slot attends `rows` rows.
bool attend_head(const AttendRowsCall& c, const AttendCall& call, const KernelTable& table,
                 int64_t slot, int64_t head, Scratch& s) {
  const int64_t rows = collect(c, slot, head, s), unit = slot * c.heads + head;
  HeadScratch& a = s.attended;
  table.prepare_query(c.dtype, c.query + unit * c.group * c.dim, c.group, c.dim, a.query);
  Ahead nothing;  // the rows are in the caches already
  for (int64_t begin = 0; begin < rows; begin += kChunkRows) {
    ChunkScan scan = chunk_of(call, a, begin / kChunkRows, rows, nothing);
    scan.keys = s.keys;
    scan.values = s.values;
    if (!table.scan_chunks(c.dtype, &scan, 1)) return false;
  }
  for (int64_t g = 0; g < c.group; ++g)
    if (!merge_chunks(call, table, slot, head, g, a)) return false;
  return true;
}

// What merging chunks takes, where each slot attends `rows` rows.
AttendCall as_attended(const AttendRowsCall& c, const int32_t* rows) {
  AttendCall call;
  call.dtype = c.dtype;
  call.heads = c.heads;
  call.group = c.group;
  call.dim = c.dim;
  call.query = c.query;
  call.attend_len = rows;
  call.self_key = c.self_key;
  call.self_value = c.self_value;
  call.scale = c.scale;
  call.output = c.output;
  return call;
}

}  // namespace

void attend_rows(const AttendRowsCall& c) {
  const KernelTable& table = active_table();
  const auto slots = static_cast<int64_t>(c.slots.size()), units = slots * c.heads;
  const int64_t query_bytes = table.query_bytes(c.dtype, c.group, c.dim);
  PoolLease lease(static_cast<int>(std::clamp<int64_t>(units, 1, c.threads)));
  Carver sizes(nullptr);
  sizes.take<std::atomic<bool>>(slots);
  sizes.take<int32_t>(slots);
  Carver shared(lease.call_scratch(sizes.used()));
  auto* bad = shared.take<std::atomic<bool>>(slots);
  auto* rows = shared.take<int32_t>(slots);
  int64_t longest = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    new (bad + slot) std::atomic<bool>(false);
    rows[slot] = c.counts[slot] + std::max(0, c.tail_end[slot] - c.tail_begin[slot]);
    longest = std::max<int64_t>(longest, rows[slot]);
  }
  const AttendCall call = as_attended(c, rows);
  Carver size(nullptr);
  Scratch(size, c, call, longest, query_bytes);
  lease.reserve_each(size.used());
  for_each_head(
      lease, slots, c.heads, bad,
      [&](Carver& carver) { return Scratch(carver, c, call, longest, query_bytes); },
      [&](int64_t slot, int64_t head, Scratch& scratch) {
        return attend_head(c, call, table, slot, head, scratch);
      });
  const int64_t out_size = c.heads * c.group * c.dim;
  for (int64_t slot = 0; slot < slots; ++slot) {
    c.status[slot] = bad[slot].load() ? 1 : 0;
    if (c.status[slot])
      std::fill(c.output + slot * out_size, c.output + (slot + 1) * out_size, 0.0f);
  }
}

}  // namespace herald
