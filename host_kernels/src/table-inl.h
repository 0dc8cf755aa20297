// Fills in a variant's table. Needs a Simd and how keys are multiplied: Bf16Dot, and the scorers
// Bf16Scorer and CodeScorer<Codes>. Everything a variant contains has internal linkage: the linker
// must never pick a function compiled for one instruction set to serve another.
#pragma once

#include <cstdint>

#include "index-inl.h"
#include "roof-inl.h"
#include "scan-inl.h"
#include "select-inl.h"

namespace herald {
namespace {

// Past the caches where the variant and the alignment allow it: what is gathered is read by a copy
// to the device, not by this core, and its lines need not be read before they are written.
inline void copy_row(const char* from, char* to, int64_t bytes, bool past_caches) {
  if (past_caches)
    for (int64_t b = 0; b < bytes; b += 64) Simd::stream_line(from + b, to + b);
  else
    for (int64_t b = 0; b < bytes; b += 32) __builtin_memcpy(to + b, from + b, 32);
}

void gather_rows(const char* keys, const char* values, const int32_t* rows, int64_t count,
                 int64_t bytes, char* to_keys, char* to_values, int64_t to_stride) {
  constexpr int64_t kAhead = 16;
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 64 == 0; };
  const bool past_caches =
      aligned(to_keys) && aligned(to_values) && to_stride % 64 == 0 && bytes % 64 == 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count)
      for (int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(keys + rows[i + kAhead] * bytes + b);
        __builtin_prefetch(values + rows[i + kAhead] * bytes + b);
      }
    copy_row(keys + rows[i] * bytes, to_keys + i * to_stride, bytes, past_caches);
    copy_row(values + rows[i] * bytes, to_values + i * to_stride, bytes, past_caches);
  }
  if (past_caches) Simd::end_streams();
}

// The read loops that the scan is measured against. Loads are as wide as the variant's own:
// narrower ones do not reach what the memory gives.
uint64_t read_bytes(const char* from, int64_t bytes, int64_t streams, int64_t ahead) {
  typedef uint64_t Wide __attribute__((vector_size(sizeof(Simd::F)), may_alias, aligned(1)));
  constexpr int64_t kWide = sizeof(Wide), kLine = 256;
  Wide sums[kLine / kWide] = {};
  const auto line = [&](const char* at) {
    for (int64_t b = 0; b < kLine; b += kWide) {
      if (ahead && b % 64 == 0)
        __builtin_prefetch(
            reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) + b + ahead));
      sums[b / kWide] ^= *reinterpret_cast<const Wide*>(at + b);
    }
  };
  const int64_t share = bytes / kLine / streams * kLine;
  if (streams == 1)
    for (int64_t i = 0; i < share; i += kLine) line(from + i);
  else
    for (int64_t i = 0; i < share; i += kLine)
      for (int64_t s = 0; s < streams; ++s) line(from + s * share + i);
  for (int64_t i = share * streams; i + kLine <= bytes; i += kLine) line(from + i);
  uint64_t words[kLine / 8], sum = 0;
  __builtin_memcpy(words, sums, sizeof words);
  for (const uint64_t word : words) sum ^= word;
  return sum;
}

template <class Scorer>
struct Type {
  using type = Scorer;
};

// Calls the function with the scorer of that kind of keys.
template <class Function>
auto with_scorer(DType dtype, const Function& function) {
  if (dtype == DType::kBFloat16) return function(Type<Bf16Scorer>());
  if (dtype == DType::kFloat32) return function(Type<RowScorer<PlainDot<float>>>());
  if (dtype == DType::kInt8Index) return function(Type<CodeScorer<Int8Codes>>());
  return function(Type<CodeScorer<Int4Codes>>());
}

int64_t query_bytes(DType dtype, int64_t group, int64_t dim) {
  return with_scorer(dtype, [&](auto s) { return decltype(s)::type::query_bytes(group, dim); });
}

void prepare_query(DType dtype, const float* query, int64_t group, int64_t dim, void* prepared) {
  with_scorer(dtype, [&](auto s) { decltype(s)::type::prepare(query, group, dim, prepared); });
}

float single_score(DType dtype, const float* query, const float* key, int64_t dim) {
  return dtype == DType::kBFloat16 ? RowScorer<Bf16Dot>::single_score(query, key, dim)
                                   : RowScorer<PlainDot<float>>::single_score(query, key, dim);
}

bool scan_chunks(DType dtype, const ChunkScan* chunks, int64_t count) {
  return with_scorer(
      dtype, [&](auto s) { return scan_chunks_with<typename decltype(s)::type>(chunks, count); });
}

void weigh_chunk(DType dtype, const ChunkScan& c, const float* maximum, const float* normaliser,
                 float* importance) {
  with_scorer(dtype, [&](auto s) {
    weigh_chunk_with<typename decltype(s)::type>(c, maximum, normaliser, importance);
  });
}

void unpack_output(DType dtype, const float* output, int64_t dim, float factor, float* natural) {
  for (int64_t d = 0; d < dim; ++d) {
    const int64_t at =
        dtype == DType::kBFloat16 ? lane_position<uint16_t>(d) : lane_position<float>(d);
    natural[d] = output[at] * factor;
  }
}

constexpr KernelTable make_table(const char* name) {
  return {name,          query_bytes, prepare_query, single_score, scan_chunks, weigh_chunk,
          unpack_output, select_head, index_rows,    gather_rows,  read_bytes,  multiply_adds};
}

}  // namespace
}  // namespace herald
