#include "rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu_features.h"
#include "thread_pool.h"

namespace herald {
namespace {

// Rows of one head that a participant takes at a time.
constexpr int64_t kPieceRows = 256;

struct Piece {
  int64_t slot, head, begin, end;
};

template <class Visit>
void cut(int64_t slots, int64_t heads, const int32_t* counts, const Visit& visit) {
  for (int64_t slot = 0; slot < slots; ++slot)
    for (int64_t begin = 0; begin < counts[slot]; begin += kPieceRows)
      for (int64_t head = 0; head < heads; ++head)
        visit(Piece{slot, head, begin, std::min<int64_t>(counts[slot], begin + kPieceRows)});
}

template <class Work>
void for_each_piece(int64_t slots, int64_t heads, const int32_t* counts, int threads,
                    const Work& work) {
  int64_t count = 0;
  cut(slots, heads, counts, [&](const Piece&) { ++count; });
  PoolLease lease(static_cast<int>(std::clamp<int64_t>(count, 1, threads)), PoolUse::kMove);
  // The pool's scratch: nothing is allocated once a call of this size has been.
  auto* pieces =
      static_cast<Piece*>(lease.call_scratch(static_cast<size_t>(count) * sizeof(Piece)));
  count = 0;
  cut(slots, heads, counts, [&](const Piece& p) { pieces[count++] = p; });
  std::atomic<int64_t> next{0};
  lease.run([&](int) {
    for (int64_t i; (i = next.fetch_add(1)) < count;) work(pieces[i]);
  });
}

}  // namespace

BadIndex find_bad_index(const RowLists& c) {
  for (int64_t slot = 0; slot < static_cast<int64_t>(c.slots.size()); ++slot) {
    const auto rows = static_cast<uint32_t>(c.slots[static_cast<size_t>(slot)].rows);
    for (int64_t head = 0; head < c.heads; ++head) {
      const int32_t* index = c.indices + (slot * c.heads + head) * c.capacity;
      uint32_t largest = 0;  // as unsigned, a negative index is larger than any row
      for (int64_t j = 0; j < c.counts[slot]; ++j)
        largest = std::max(largest, static_cast<uint32_t>(index[j]));
      if (c.counts[slot] == 0 || largest < rows) continue;
      int64_t j = 0;
      while (static_cast<uint32_t>(index[j]) < rows) ++j;
      return {true, slot, head, j};
    }
  }
  return {false, 0, 0, 0};
}

void gather(const GatherCall& c) {
  const KernelTable& table = active_table();
  const int64_t bytes = c.dim * item_size(c.dtype);
  const auto slots = static_cast<int64_t>(c.slots.size());
  for_each_piece(slots, c.heads, c.counts, c.threads, [&](const Piece& p) {
    const Extent& extent = c.slots[static_cast<size_t>(p.slot)];
    const char* keys = extent.data + 2 * p.head * extent.rows * bytes;
    const int32_t* index = c.indices + (p.slot * c.heads + p.head) * c.capacity + p.begin;
    const int64_t row = p.slot * c.rows + c.row_offset + p.begin;
    const int64_t to = (row * c.heads + p.head) * bytes;
    table.gather_rows(keys, keys + extent.rows * bytes, index, p.end - p.begin, bytes, c.keys + to,
                      c.values + to, c.heads * bytes);
  });
}

void index_rows(const IndexCall& c) {
  const KernelTable& table = active_table();
  const int64_t bytes = c.dim * item_size(c.dtype);
  const auto slots = static_cast<int64_t>(c.slots.size());
  for_each_piece(slots, c.heads, c.counts, c.threads, [&](const Piece& p) {
    const auto slot = static_cast<size_t>(p.slot);
    const Extent &rows = c.slots[slot], &index = c.index[slot];
    char* tiles = index.data + p.head * (index.rows / kTileRows) * tile_bytes(c.kind, c.dim);
    table.index_rows(c.dtype, c.kind, rows.data + 2 * p.head * rows.rows * bytes,
                     c.start[p.slot] + p.begin, p.end - p.begin, c.dim, tiles);
  });
}

void store(const StoreCall& c) {
  const int64_t bytes = c.dim * item_size(c.dtype);
  const auto slots = static_cast<int64_t>(c.slots.size());
  for_each_piece(slots, c.heads, c.counts, c.threads, [&](const Piece& p) {
    const Extent& extent = c.slots[static_cast<size_t>(p.slot)];
    for (int64_t j = p.begin; j < p.end; ++j) {
      const int64_t from = ((p.slot * c.rows + j) * c.heads + p.head) * bytes;
      char* to = extent.data + (2 * p.head * extent.rows + c.start[p.slot] + j) * bytes;
      std::memcpy(to, c.keys + from, static_cast<size_t>(bytes));
      std::memcpy(to + extent.rows * bytes, c.values + from, static_cast<size_t>(bytes));
    }
  });
}

}  // namespace herald
