// Top-k by histogram on every instruction set against a stable sort.
#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu_features.h"

namespace {

void check_select(const herald::KernelTable& table, const std::vector<float>& values,
                  int64_t budget, int64_t sinks) {
  const auto n = static_cast<int64_t>(values.size());
  const int64_t padded = herald::round_up(n, herald::kTileRows);
  std::vector<float> weights(static_cast<size_t>(padded)), importance(weights.size());
  std::copy(values.begin(), values.end(), weights.begin());
  const std::vector<float> exponents(weights.size(), 0);
  std::vector<uint32_t> histogram(herald::kHistogramTables * herald::kHistogramBins);
  std::vector<uint32_t> candidates(static_cast<size_t>(n + herald::kMaxLanes));
  std::vector<int32_t> got(static_cast<size_t>(budget), -9), want(static_cast<size_t>(n));
  const float zero = 0, one = 1;
  herald::Ahead nothing;
  herald::HeadSelect h{weights.data(),
                       exponents.data(),
                       1,
                       &zero,
                       &one,
                       n,
                       budget,
                       sinks,
                       0,
                       importance.data(),
                       histogram.data(),
                       candidates.data(),
                       got.data(),
                       &nothing};
  table.select_head(h);
  std::iota(want.begin(), want.end(), 0);
  const int64_t first = std::min(sinks, budget);
  std::stable_sort(want.begin() + first, want.end(),
                   [&](int32_t a, int32_t b) { return values[a] > values[b]; });
  want.resize(static_cast<size_t>(budget));
  std::sort(want.begin(), want.end());
  CHECK(got == want, "%s n %d budget %d sinks %d", table.name, int(n), int(budget), int(sinks));
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const std::string& isa : check::isas()) {
    const herald::KernelTable& table = *herald::compiled_table(isa);
    for (int64_t n : {1, 2, 15, 16, 17, 31, 32, 33, 100, 4095, 4096, 4097, 9001}) {
      for (int kind = 0; kind < 5; ++kind) {
        std::vector<float> values(static_cast<size_t>(n));
        for (size_t i = 0; i < values.size(); ++i) {
          const float u = std::uniform_real_distribution<float>()(random);
          if (kind == 0) values[i] = u;
          if (kind == 1) values[i] = 0.5f;                            // all tied
          if (kind == 2) values[i] = static_cast<float>(i) / 1e5f;    // growing: recency
          if (kind == 3) values[i] = static_cast<float>(int(u * 4));  // many ties, zeros too
          if (kind == 4) values[i] = 0.5f + u * 1e-6f;                // one bin for all
        }
        for (int64_t budget : {int64_t{0}, int64_t{1}, n / 20, n / 2, n - 1, n})
          for (int64_t sinks : {0, 4, 40}) check_select(table, values, budget, sinks);
      }
    }
  }
  return check::finish();
}
