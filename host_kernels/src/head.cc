#include "head.h"

#include <algorithm>
#include <cmath>

namespace herald {
namespace {

float power_of_two(float n) { return n >= -126 ? std::ldexp(1.0f, static_cast<int>(n)) : 0.0f; }

}  // namespace

ChunkScan chunk_of(const AttendCall& c, const HeadScratch& s, int64_t chunk, int64_t length,
                   Ahead& ahead) {
  ChunkScan scan{};
  scan.begin = chunk * kChunkRows;
  scan.end = std::min(length, scan.begin + kChunkRows);
  scan.group = c.group;
  scan.dim = c.dim;
  scan.query = s.query;
  scan.log2_scale = c.scale * kLog2E;
  scan.ahead = &ahead;
  scan.weights = s.weights;
  scan.exponents = s.exponents;
  scan.lanes = s.lanes + chunk * c.group * kMaxLanes;
  scan.maximum = s.maximum + chunk * c.group;
  scan.normaliser = s.normaliser + chunk * c.group;
  scan.output = s.output + chunk * c.group * round_up(c.dim, kDimPad);
  return scan;
}

// Chunks in ascending order, then the slot's own key; the integer maxima keep rescaling exact.
bool merge_chunks(const AttendCall& c, const KernelTable& table, int64_t slot, int64_t head,
                  int64_t g, HeadScratch& s) {
  const int64_t unit = slot * c.heads + head, padded = round_up(c.dim, kDimPad);
  const int64_t count = (c.attend_len[slot] + kChunkRows - 1) / kChunkRows;
  float self = 0, maximum = -INFINITY, normaliser = 0;
  for (int64_t k = 0; k < count; ++k) maximum = std::max(maximum, s.maximum[k * c.group + g]);
  if (c.self_key) {
    const float* key = c.self_key + unit * c.dim;
    const float* query = c.query + (unit * c.group + g) * c.dim;
    self = table.single_score(c.dtype, query, key, c.dim) * (c.scale * kLog2E);
    if (!std::isfinite(self)) return false;
    maximum = std::max(maximum, std::nearbyint(self));
  }
  float outside = -INFINITY;
  if (c.elsewhere) {
    outside = c.elsewhere[unit * c.group + g] * kLog2E;
    if (std::isnan(outside) || outside == INFINITY) return false;
    maximum = std::max(maximum, std::nearbyint(outside));
  }
  float* total = s.head_output;
  std::fill(total, total + padded, 0.0f);
  for (int64_t k = 0; k < count; ++k) {
    const float factor = power_of_two(s.maximum[k * c.group + g] - maximum);
    normaliser += s.normaliser[k * c.group + g] * factor;
    const float* part = s.output + (k * c.group + g) * padded;
    for (int64_t d = 0; c.output && d < padded; ++d) total[d] += part[d] * factor;
  }
  const float self_weight = c.self_key ? std::exp2(self - maximum) : 0.0f;
  normaliser += self_weight;
  if (outside > -INFINITY) normaliser += std::exp2(outside - maximum);
  s.head_maximum[g] = maximum;
  s.head_normaliser[g] = normaliser;
  if (!c.output) return true;
  float* natural = c.output + (unit * c.group + g) * c.dim;
  const float inverse = normaliser > 0 ? 1 / normaliser : 0.0f;
  table.unpack_output(c.dtype, total, c.dim, inverse, natural);
  bool finite = true;
  for (int64_t d = 0; d < c.dim; ++d) {
    if (c.self_key) natural[d] += c.self_value[unit * c.dim + d] * self_weight * inverse;
    finite &= std::isfinite(natural[d]);
  }
  return finite;
}

void write_rest(const AttendCall& c, int64_t slot, int64_t head, const HeadScratch& s) {
  const int64_t unit = slot * c.heads + head;
  const int32_t* rows = c.indices + unit * c.capacity;
  for (int64_t g = 0; g < c.group; ++g) {
    const float maximum = s.head_maximum[g];
    double selected = 0;
    for (int64_t j = 0; j < c.budget[slot]; ++j) {
      const float exponent = s.exponents[rows[j] / kTileRows * c.group + g];
      const int64_t at = tile_weights(rows[j] / kTileRows, c.group, g) + rows[j] % kTileRows;
      selected += static_cast<double>(s.weights[at]) *
                  static_cast<double>(power_of_two(exponent - maximum));
    }
    const double rest = static_cast<double>(s.head_normaliser[g]) - selected;
    c.log_rest[unit * c.group + g] =
        rest > 0 ? static_cast<float>((maximum + std::log2(rest)) / kLog2E) : -INFINITY;
  }
}

}  // namespace herald
