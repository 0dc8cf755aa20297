// Fills in a variant's table. Needs a Simd, select-inl.h and a Bf16Dot type (how bf16 keys are
// multiplied). Everything a variant contains has internal linkage: the linker must never pick a
// function compiled for one instruction set to serve another.
#pragma once

#include <cstdint>

#include "select-inl.h"

namespace herald {
namespace {

inline void copy_row(const char* from, char* to, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 32) __builtin_memcpy(to + b, from + b, 32);
}

void gather_rows(const char* keys, const char* values, const int32_t* rows, int64_t count,
                 int64_t bytes, char* to_keys, char* to_values, int64_t to_stride) {
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count)
      for (int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(keys + rows[i + kAhead] * bytes + b);
        __builtin_prefetch(values + rows[i + kAhead] * bytes + b);
      }
    copy_row(keys + rows[i] * bytes, to_keys + i * to_stride, bytes);
    copy_row(values + rows[i] * bytes, to_values + i * to_stride, bytes);
  }
}

// The plain read loop that the scan is measured against.
uint64_t read_bytes(const char* from, int64_t bytes) {
  uint64_t sums[32] = {};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    uint64_t words[32];
    __builtin_memcpy(words, from + i, 256);
    for (int j = 0; j < 32; ++j) sums[j] ^= words[j];
  }
  uint64_t sum = 0;
  for (int j = 0; j < 32; ++j) sum ^= sums[j];
  return sum;
}

void prepare_query(DType dtype, const float* query, int64_t group, int64_t dim, void* prepared) {
  if (dtype == DType::kBFloat16)
    prepare_query_as<Bf16Dot>(query, group, dim, prepared);
  else
    prepare_query_as<PlainDot<float>>(query, group, dim, prepared);
}

float single_score(DType dtype, const float* query, const float* key, int64_t dim) {
  return dtype == DType::kBFloat16 ? single_score_as<Bf16Dot>(query, key, dim)
                                   : single_score_as<PlainDot<float>>(query, key, dim);
}

bool scan_chunk(DType dtype, const ChunkScan& c) {
  return dtype == DType::kBFloat16 ? scan_chunk_as<Bf16Dot>(c) : scan_chunk_as<PlainDot<float>>(c);
}

constexpr KernelTable make_table(const char* name) {
  return {name,          prepare_query, single_score, scan_chunk,
          unpack_output, select_head,   gather_rows,  read_bytes};
}

}  // namespace
}  // namespace herald
