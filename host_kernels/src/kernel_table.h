// The contract between the driver and the instruction-set variants: one table of functions each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ahead.h"

namespace herald {

// Rows scored together; every variant splits at the same borders, so results depend on length only.
constexpr int64_t kTileRows = 32;
// Rows of one head scanned from a fresh softmax state; chunks are merged in ascending order.
constexpr int64_t kChunkRows = 4096;
// Head dimensions are padded to this in scratch, so that the widest variant needs one tail at most.
constexpr int64_t kDimPad = 32;
// The largest head dimension.
constexpr int64_t kMaxDim = 1024;
// Lanes of the widest variant.
constexpr int64_t kMaxLanes = 16;
constexpr int64_t kHistogramBins = 4096;
constexpr int64_t kHistogramTables = 4;
// Importance below this counts as zero. It lies far enough above the smallest normal number that a
// row's importance is the same wherever it stands, so equal scores stay ties.
constexpr float kImportanceFloor = 0x1p-100f;

// static: a variant must not share even this with the others through the linker.
static constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// How keys are stored: rows of numbers, or tiles of a key index.
enum class DType { kBFloat16, kFloat32, kInt8Index, kInt4Index };

static constexpr bool is_index(DType dtype) {
  return dtype == DType::kInt8Index || dtype == DType::kInt4Index;
}

// Bytes of one number of a row.
static constexpr int64_t item_size(DType dtype) { return dtype == DType::kBFloat16 ? 2 : 4; }

// Bytes of the codes of one index tile: [dim / 4][32 keys][4] of a byte each or, two to a byte,
// [dim / 8][32 keys][4], where four dimensions lie in the low halves and the next four in the high.
static constexpr int64_t code_bytes(DType index, int64_t dim) {
  return kTileRows * (index == DType::kInt4Index ? dim / 2 : dim);
}

// Bytes of one index tile: codes, then a float scale for each key.
static constexpr int64_t tile_bytes(DType index, int64_t dim) {
  return code_bytes(index, dim) + kTileRows * 4;
}

// Vectors without a component of this size are stored as zeros.
constexpr float kSmallestKey = 0x1p-100f;

// Queries that are scored together, and the most whose weights are stored between the two halves of
// a selection; with more of them, scores are computed twice instead.
constexpr int64_t kQuerySet = 16;

// One chunk of one KV head; rows of keys and of values are `dim` items long and contiguous.
struct ChunkScan {
  const void* keys;    // row 0 of the head, or its first tile
  const void* values;  // the same; null: no attention output is accumulated
  int64_t begin, end;  // rows of this chunk; begin is a multiple of kChunkRows
  int64_t group, dim;  // query heads per KV head; head dimension, a multiple of 16
  const void* query;   // as written by prepare_query
  float log2_scale;    // softmax scale * log2(e)
  Ahead* ahead;        // of the scan
  // 2^(score - exponent of its tile), [tiles of the head][group][kTileRows], or null. One stream to
  // write and read: a plane a query would put the rows of a tile into as many lines of one set.
  float* weights;
  float* exponents;  // [tiles of the head][group]: the integer maximum in force at each tile
  float* lanes;      // scratch, [group][kMaxLanes]
  // Result of the chunk, [group] each; output is [group][padded dim] in the variant's lane order.
  float* maximum;
  float* normaliser;
  float* output;
};

// Turns the stored weights of one head into importance and takes the `budget` best rows.
struct HeadSelect {
  const float* weights;  // as ChunkScan has them; null: importance is there already
  const float* exponents;
  int64_t group;
  const float* maximum;     // [group], over everything attended
  const float* normaliser;  // [group]
  int64_t select_len, budget, sinks, recent;
  float* importance;     // scratch, select_len rounded up to kTileRows
  uint32_t* histogram;   // scratch, kHistogramTables * kHistogramBins
  uint32_t* candidates;  // scratch, select_len + kMaxLanes
  int32_t* indices;      // result, `budget` ascending rows
  Ahead* ahead;          // of the next scan, whose memory is asked for meanwhile
};

struct KernelTable {
  const char* name;
  // Bytes of a group's queries in the form scan_chunk reads.
  int64_t (*query_bytes)(DType, int64_t group, int64_t dim);
  // query [group][dim] fp32 -> that form.
  void (*prepare_query)(DType, const float* query, int64_t group, int64_t dim, void* prepared);
  // q.k of one query and one fp32 key, the query rounded just as prepare_query rounds it.
  float (*single_score)(DType, const float* query, const float* key, int64_t dim);
  // Scans chunks of one head, or of several with the same shape, in turns. False where a score is
  // not finite; the results are then unusable.
  bool (*scan_chunks)(DType, const ChunkScan*, int64_t count);
  // importance[row] of the chunk's rows from their scores anew, with the head's maximum and
  // normaliser [group]; the same numbers as select_head finds from stored weights.
  void (*weigh_chunk)(DType, const ChunkScan&, const float* maximum, const float* normaliser,
                      float* importance);
  // Output lane order -> natural order, times `factor`.
  void (*unpack_output)(DType, const float* output, int64_t dim, float factor, float* natural);
  void (*select_head)(const HeadSelect&);
  // Writes rows [first, first + count) of a head's index; `keys` is row 0 of the head.
  void (*index_rows)(DType keys_type, DType index, const void* keys, int64_t first, int64_t count,
                     int64_t dim, char* tiles);
  // Copies the named rows, `bytes` (a multiple of 32) each: keys[rows[i]] to
  // to_keys + i * to_stride, and values likewise.
  void (*gather_rows)(const char* keys, const char* values, const int32_t* rows, int64_t count,
                      int64_t bytes, char* to_keys, char* to_values, int64_t to_stride);
  // XOR of all whole 256-byte lines, read as `streams` sequential streams side by side; each is
  // prefetched `ahead` bytes ahead, 0 leaves it to the hardware.
  uint64_t (*read_bytes)(const char* from, int64_t bytes, int64_t streams, int64_t ahead);
  // Nothing but the products of scan_chunk, out of registers; returns the operations done, 0 where
  // the variant has no instruction of its own for them.
  int64_t (*multiply_adds)(DType, int64_t rounds, float* sum);
};

// Where the weights of a query for the rows of a tile begin.
static constexpr int64_t tile_weights(int64_t tile, int64_t group, int64_t query) {
  return (tile * group + query) * kTileRows;
}

extern const KernelTable kScalarTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512VnniTable;
extern const KernelTable kAvx512Bf16Table;
extern const KernelTable kAmxTable;

}  // namespace herald
