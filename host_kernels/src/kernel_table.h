// The contract between the driver and the instruction-set variants: one table of functions each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace herald {

// Rows scored together; every variant splits at the same borders, so results depend on length only.
constexpr int64_t kTileRows = 32;
// Rows of one head scanned from a fresh softmax state; chunks are merged in ascending order.
constexpr int64_t kChunkRows = 4096;
// Head dimensions are padded to this in scratch, so that the widest variant needs one tail at most.
constexpr int64_t kDimPad = 32;
constexpr int64_t kHistogramBins = 4096;
constexpr int64_t kHistogramTables = 4;
// Importance below this counts as zero. It lies far enough above the smallest normal number that a
// row's importance is the same wherever it stands, so equal scores stay ties.
constexpr float kImportanceFloor = 0x1p-100f;

// static: a variant must not share even this with the others through the linker.
static constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

enum class DType { kBFloat16, kFloat32 };

static constexpr int64_t item_size(DType dtype) { return dtype == DType::kBFloat16 ? 2 : 4; }

// One chunk of one KV head; rows of keys and of values are `dim` items long and contiguous.
struct ChunkScan {
  const void* keys;        // row 0 of the head
  const void* values;      // the same; null: no attention output is accumulated
  int64_t begin, end;      // rows of this chunk; begin is a multiple of kChunkRows
  int64_t group, dim;      // query heads per KV head; head dimension, a multiple of 16
  const void* query;       // [group][padded dim] as written by prepare_query
  float log2_scale;        // softmax scale * log2(e)
  int64_t prefetch_bytes;  // how far ahead to prefetch; 0 leaves it to the hardware
  float* weights;          // [group][weight_stride]: 2^(score - exponent of its tile)
  int64_t weight_stride;
  float* exponents;  // [tiles of the head][group]: the integer maximum in force at each tile
  // Result of the chunk, [group] each; output is [group][padded dim] in the variant's lane order.
  float* maximum;
  float* normaliser;
  float* output;
};

// Turns the stored weights of one head into importance and takes the `budget` best rows.
struct HeadSelect {
  const float* weights;
  int64_t weight_stride;
  const float* exponents;
  int64_t group;
  const float* maximum;     // [group], over everything attended
  const float* normaliser;  // [group]
  int64_t select_len, budget, sinks, recent;
  float* importance;     // scratch, select_len rounded up to kTileRows
  uint32_t* histogram;   // scratch, kHistogramTables * kHistogramBins
  uint32_t* candidates;  // scratch, select_len
  int32_t* indices;      // result, `budget` ascending rows
};

struct KernelTable {
  const char* name;
  // query [group][dim] fp32 -> the form scan_chunk reads, at most 4 bytes a padded dimension.
  void (*prepare_query)(DType, const float* query, int64_t group, int64_t dim, void* prepared);
  // q.k of one query and one fp32 key, the query rounded just as prepare_query rounds it.
  float (*single_score)(DType, const float* query, const float* key, int64_t dim);
  // False as soon as a score is not finite; the result is then unusable.
  bool (*scan_chunk)(DType, const ChunkScan&);
  // Output lane order -> natural order, times `factor`.
  void (*unpack_output)(DType, const float* output, int64_t dim, float factor, float* natural);
  void (*select_head)(const HeadSelect&);
  // Copies the named rows, `bytes` (a multiple of 32) each: keys[rows[i]] to
  // to_keys + i * to_stride, and values likewise.
  void (*gather_rows)(const char* keys, const char* values, const int32_t* rows, int64_t count,
                      int64_t bytes, char* to_keys, char* to_values, int64_t to_stride);
  // XOR of all whole 256-byte lines: a plain read loop.
  uint64_t (*read_bytes)(const char* from, int64_t bytes);
};

extern const KernelTable kScalarTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512Bf16Table;

}  // namespace herald
