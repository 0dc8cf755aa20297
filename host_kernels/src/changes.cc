#include "changes.h"

#include <algorithm>
#include <atomic>

#include "cpu_features.h"
#include "thread_pool.h"

namespace herald {
namespace {

// One KV head of a slot.
struct Unit {
  const int32_t *rows, *previous;
  int64_t count, previous_count;
  int32_t* source;
};

Unit unit_of(const ChangesCall& c, int64_t index) {
  const int64_t slot = index / c.heads;
  return {c.indices + index * c.capacity, c.previous + index * c.previous_capacity, c.counts[slot],
          c.previous_counts[slot], c.source + index * c.capacity};
}

// Walks both ascending lists: source becomes the place in the previous one, or -1. Returns how many
// rows are new.
int64_t match(const Unit& u, int64_t capacity) {
  int64_t place = 0, missing = 0;
  for (int64_t j = 0; j < u.count; ++j) {
    while (place < u.previous_count && u.previous[place] < u.rows[j]) ++place;
    const bool held = place < u.previous_count && u.previous[place] == u.rows[j];
    u.source[j] = held ? static_cast<int32_t>(place) : -1;
    missing += !held;
  }
  std::fill(u.source + u.count, u.source + capacity, 0);
  return missing;
}

}  // namespace

int64_t gather_changes(const ChangesCall& c) {
  const KernelTable& table = active_table();
  const int64_t units = static_cast<int64_t>(c.slots.size()) * c.heads;
  const int64_t bytes = c.dim * item_size(c.dtype);
  PoolLease lease(static_cast<int>(std::clamp<int64_t>(units, 1, c.threads)), PoolUse::kMove);
  // Where each unit's new rows begin, and a list of rows for each participant.
  auto* first =
      static_cast<int64_t*>(lease.call_scratch(static_cast<size_t>(units + 1) * sizeof(int64_t)));
  lease.reserve_each(static_cast<size_t>(c.capacity + 1) * sizeof(int32_t));
  std::atomic<int64_t> next{0};
  lease.run([&](int) {
    for (int64_t i; (i = next.fetch_add(1)) < units;)
      first[i + 1] = match(unit_of(c, i), c.capacity);
  });
  first[0] = 0;
  for (int64_t i = 0; i < units; ++i) first[i + 1] += first[i];
  next = 0;
  lease.run([&](int participant) {
    auto* list = static_cast<int32_t*>(lease.scratch_of(participant));
    for (int64_t i; (i = next.fetch_add(1)) < units;) {
      const Unit u = unit_of(c, i);
      int64_t row = first[i], listed = 0;
      for (int64_t j = 0; j < u.count; ++j)
        if (u.source[j] < 0) {
          u.source[j] = static_cast<int32_t>(-1 - row);
          if (row++ < c.rows) list[listed++] = u.rows[j];
        }
      if (listed == 0) continue;
      const Extent& extent = c.slots[static_cast<size_t>(i / c.heads)];
      const char* keys = extent.data + 2 * (i % c.heads) * extent.rows * bytes;
      table.gather_rows(keys, keys + extent.rows * bytes, list, listed, bytes,
                        c.keys + first[i] * bytes, c.values + first[i] * bytes, bytes);
    }
  });
  return first[units];
}

}  // namespace herald
