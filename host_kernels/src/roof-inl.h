// What the arithmetic of a scan could do if it never waited for memory. Needs score-inl.h, Bf16Dot
// and, where there are tile products, amx-inl.h.
#pragma once

#include <cstdint>

#include "score-inl.h"

namespace herald {
namespace {

// Enough sums to hide the latency of a product, few enough to stay in registers.
constexpr int kRoofSums = 12;

template <class Dot>
int64_t multiply_adds_as(int64_t rounds, float* sum) {
  typename Dot::QueryItem query[kPair];
  typename Dot::Key key[kPair];
  float ones[kPair];
  for (int64_t d = 0; d < kPair; ++d) ones[d] = 1;
  Dot::prepare(ones, kPair, kPair, query);
  for (int64_t d = 0; d < kPair; ++d) key[d] = static_cast<typename Dot::Key>(*sum);
  const auto q = Dot::load_query(query);
  const auto k = Dot::load_key(key, false);
  Simd::F sums[kRoofSums];
  for (int i = 0; i < kRoofSums; ++i) sums[i] = Simd::set(static_cast<float>(i));
  for (int64_t r = 0; r < rounds; ++r)
    for (int i = 0; i < kRoofSums; ++i) sums[i] = Dot::accumulate(sums[i], k, q);
  for (int i = 1; i < kRoofSums; ++i) sums[0] = Simd::add(sums[0], sums[i]);
  *sum = Simd::sum(sums[0]);
  return rounds * kRoofSums * kPair * 2;
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// Tile products, four sums side by side; a tile has 16 rows of 64 bytes.
template <int kItems>
int64_t tile_products(int64_t rounds, float* sum) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.shape(tile, 16, 64);
  _tile_loadconfig(&config);
  alignas(64) char lines[16 * 64] = {};
  _tile_loadd(0, lines, 64);
  _tile_loadd(1, lines, 64);
  _tile_loadd(2, lines, 64);
  _tile_loadd(3, lines, 64);
  _tile_loadd(4, lines, 64);
  _tile_loadd(5, lines, 64);
  for (int64_t r = 0; r < rounds; ++r) {
    if (kItems == 32) {
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 5);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 5);
    } else {
      _tile_dpbsud(0, 4, 5);
      _tile_dpbsud(1, 4, 5);
      _tile_dpbsud(2, 4, 5);
      _tile_dpbsud(3, 4, 5);
    }
  }
  _tile_stored(0, lines, 64);
  _tile_release();
  *sum = static_cast<float>(lines[0]);
  return rounds * 4 * 16 * 16 * kItems * 2;
}
#endif

int64_t bf16_products(int64_t rounds, float* sum) {
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
  return tile_products<32>(rounds, sum);
#else
  return multiply_adds_as<Bf16Dot>(rounds, sum);
#endif
}

// 0 where the variant has no instruction for it.
int64_t int8_products(int64_t rounds, float* sum) {
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
  return tile_products<64>(rounds, sum);
#elif defined(__AVX512VNNI__)
  const __m512i key = _mm512_set1_epi32(static_cast<int>(*sum)), query = _mm512_set1_epi32(1);
  __m512i sums[kRoofSums];
  for (int i = 0; i < kRoofSums; ++i) sums[i] = _mm512_set1_epi32(i);
  for (int64_t r = 0; r < rounds; ++r)
    for (int i = 0; i < kRoofSums; ++i) {
      sums[i] = _mm512_dpbusd_epi32(sums[i], key, query);
      // The products are integers: a compiler may take them out of the loop or multiply instead.
      asm volatile("" : "+v"(sums[i]));
    }
  for (int i = 1; i < kRoofSums; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  *sum = static_cast<float>(_mm512_reduce_add_epi32(sums[0]));
  return rounds * kRoofSums * 64 * 2;
#else
  return static_cast<void>(rounds), static_cast<void>(sum), 0;
#endif
}

int64_t multiply_adds(DType dtype, int64_t rounds, float* sum) {
  if (is_index(dtype)) return int8_products(rounds, sum);
  return dtype == DType::kBFloat16 ? bf16_products(rounds, sum)
                                   : multiply_adds_as<PlainDot<float>>(rounds, sum);
}

}  // namespace
}  // namespace herald
