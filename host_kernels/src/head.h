// One KV head of one slot while it is attended: its working memory, and what its chunks add up to.
#pragma once

#include <atomic>
#include <cstdint>

#include "attend.h"
#include "carver.h"
#include "thread_pool.h"

namespace herald {

constexpr float kLog2E = 1.44269504088896340736f;

// Whether scores are computed once for the softmax and again for the importance, because the
// weights of so many queries would be more to write and read than the keys.
inline bool scores_twice(const AttendCall& c) { return !c.output && c.group > kQuerySet; }

// Working memory of one participant, only needed while a head is selected.
struct SelectScratch {
  SelectScratch(Carver& carver, int64_t rows) {
    importance = carver.take<float>(round_up(rows, kTileRows));
    histogram = carver.take<uint32_t>(kHistogramTables * kHistogramBins);
    candidates = carver.take<uint32_t>(rows + kMaxLanes);
  }
  float* importance;
  uint32_t *histogram, *candidates;
};

// Working memory of one KV head: enough for `rows` rows.
struct HeadScratch {
  HeadScratch(Carver& carver, const AttendCall& c, int64_t rows, int64_t query_bytes) {
    const int64_t padded = round_up(rows, kTileRows), chunks = (rows + kChunkRows - 1) / kChunkRows;
    const int64_t dims = c.group * round_up(c.dim, kDimPad);
    query = carver.take<char>(query_bytes);
    const bool twice = scores_twice(c);
    weights = twice ? nullptr : carver.take<float>(c.group * padded);
    exponents = carver.take<float>(twice ? 0 : padded / kTileRows * c.group);
    importance = carver.take<float>(twice ? padded : 0);
    lanes = carver.take<float>(chunks * c.group * kMaxLanes);
    maximum = carver.take<float>(chunks * c.group);
    normaliser = carver.take<float>(chunks * c.group);
    output = carver.take<float>(c.output ? chunks * dims : 0);
    head_maximum = carver.take<float>(c.group);
    head_normaliser = carver.take<float>(c.group);
    head_output = carver.take<float>(round_up(c.dim, kDimPad));
  }
  char* query;
  float *weights, *exponents, *importance;
  float *lanes, *maximum, *normaliser, *output;         // per chunk
  float *head_maximum, *head_normaliser, *head_output;  // merged
};

// Chunk `chunk` of a head of `length` rows, but for where its keys and values lie.
ChunkScan chunk_of(const AttendCall& c, const HeadScratch& s, int64_t chunk, int64_t length,
                   Ahead& ahead);

// Hands out heads one by one to the participants of a lease, each with a scratch of its own from
// make(carver); a slot one of whose heads work(slot, head, scratch) fails is bad.
template <class Make, class Work>
void for_each_head(PoolLease& lease, int64_t slots, int64_t heads, std::atomic<bool>* bad,
                   const Make& make, const Work& work) {
  std::atomic<int64_t> next{0};
  lease.run([&](int participant) {
    Carver carver(lease.scratch_of(participant));
    auto scratch = make(carver);
    for (int64_t unit; (unit = next.fetch_add(1)) < slots * heads;)
      if (!work(unit / heads, unit % heads, scratch))
        bad[unit / heads].store(true, std::memory_order_relaxed);
  });
}

// Merges the chunks of one query into its maximum, normaliser and attention output. False where a
// number is not finite.
bool merge_chunks(const AttendCall& c, const KernelTable& table, int64_t slot, int64_t head,
                  int64_t query, HeadScratch& s);

// Fills in `log_rest` of a head whose rows have been selected.
void write_rest(const AttendCall& c, int64_t slot, int64_t head, const HeadScratch& s);

}  // namespace herald
