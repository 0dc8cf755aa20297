// Re-ranking, top-k and gathers of changes: valid shapes and lists of rows, any contents.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "changes.h"
#include "rerank.h"
#include "shapes.h"

namespace {

// `count` ascending rows of [0, held).
void ascending(FuzzedDataProvider& input, int64_t held, int32_t count, int32_t* rows) {
  int64_t next = 0;
  for (int32_t j = 0; j < count; ++j) {
    const int64_t spare = held - next - (count - j);
    next += input.ConsumeIntegralInRange<int64_t>(0, std::min<int64_t>(spare, 3));
    rows[j] = static_cast<int32_t>(next++);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fuzz;
  FuzzedDataProvider input(data, size);
  choose_isa(input);
  const DType dtype = input.ConsumeBool() ? DType::kBFloat16 : DType::kFloat32;
  const int64_t slots = input.ConsumeIntegralInRange<int64_t>(1, 3);
  const int64_t heads = input.ConsumeIntegralInRange<int64_t>(1, 3), width = dim(input);
  const int64_t group = input.ConsumeIntegralInRange<int64_t>(1, 20), capacity = 40;
  const int threads = input.ConsumeIntegralInRange<int>(1, 3);

  std::vector<std::vector<char>> storage;
  std::vector<herald::Extent> extents;
  std::vector<int32_t> counts, previous_counts, budget;
  std::vector<int32_t> rows_now(static_cast<size_t>(slots * heads * capacity), -1);
  std::vector<int32_t> before = rows_now;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t held = rows(input), most = std::min(held, capacity);
    storage.push_back(
        Filler(input).block<char>(heads * 2 * held * width * herald::item_size(dtype)));
    extents.push_back({storage.back().data(), held});
    counts.push_back(input.ConsumeIntegralInRange<int32_t>(0, static_cast<int32_t>(most)));
    previous_counts.push_back(input.ConsumeIntegralInRange<int32_t>(0, static_cast<int32_t>(most)));
    budget.push_back(input.ConsumeIntegralInRange<int32_t>(0, counts.back()));
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = (slot * heads + head) * capacity;
      ascending(input, held, counts.back(), rows_now.data() + at);
      ascending(input, held, previous_counts.back(), before.data() + at);
    }
  }

  Filler filler(input);
  const auto query = filler.block<float>(slots * heads * group * width);
  const auto elsewhere = filler.block<float>(slots * heads * group);
  std::vector<int32_t> chosen(rows_now.size(), -7), status(static_cast<size_t>(slots), -7);
  herald::RerankCall rerank{};
  rerank.dtype = dtype;
  rerank.slots = extents;
  rerank.heads = heads;
  rerank.group = group;
  rerank.dim = width;
  rerank.query = query.data();
  rerank.candidates = rows_now.data();
  rerank.candidate_capacity = rerank.capacity = capacity;
  rerank.counts = counts.data();
  rerank.budget = budget.data();
  rerank.indices = chosen.data();
  rerank.sinks = input.ConsumeIntegralInRange<int64_t>(0, 8);
  rerank.recent = input.ConsumeIntegralInRange<int64_t>(0, 8);
  if (input.ConsumeBool()) rerank.elsewhere = elsewhere.data();
  rerank.scale = input.ConsumeFloatingPoint<float>();
  rerank.status = status.data();
  rerank.threads = threads;
  herald::rerank(rerank);
  for (int64_t i = 0; i < slots * heads; ++i) {
    const auto slot = static_cast<size_t>(i / heads);
    REQUIRE(status[slot] == 0 || status[slot] == 1);
    const int32_t *candidates = rows_now.data() + i * capacity, *got = chosen.data() + i * capacity;
    for (int64_t j = 0; j < capacity; ++j)
      REQUIRE(j >= budget[slot]
                  ? got[j] == -1
                  : std::binary_search(candidates, candidates + counts[slot], got[j]) &&
                        (j == 0 || got[j] > got[j - 1]));
  }

  const int64_t room = input.ConsumeIntegralInRange<int64_t>(0, 200);
  std::vector<int32_t> source(rows_now.size(), -7);
  std::vector<char> keys(static_cast<size_t>(room * width * herald::item_size(dtype)));
  std::vector<char> values(keys.size());
  const int64_t lacking = herald::gather_changes(
      {dtype, extents, heads, width, rows_now.data(), capacity, counts.data(), before.data(),
       capacity, previous_counts.data(), source.data(), keys.data(), values.data(), room, threads});
  int64_t expected = 0;
  for (int64_t i = 0; i < slots * heads; ++i)
    for (int64_t j = 0; j < counts[static_cast<size_t>(i / heads)]; ++j) {
      const int32_t* old = before.data() + i * capacity;
      const int32_t held = previous_counts[static_cast<size_t>(i / heads)];
      const bool kept = std::binary_search(old, old + held, rows_now[i * capacity + j]);
      REQUIRE(kept == (source[i * capacity + j] >= 0));
      expected += !kept;
    }
  REQUIRE(lacking == expected);

  auto shares = filler.block<float>(rows(input));
  for (float& x : shares) x = std::isfinite(x) ? std::fabs(x) : 0.0f;
  const auto held = static_cast<int64_t>(shares.size());
  std::vector<int32_t> best(static_cast<size_t>(input.ConsumeIntegralInRange<int64_t>(0, held)),
                            -7);
  herald::top_k(shares.data(), held, static_cast<int64_t>(best.size()), best.data());
  for (size_t j = 0; j < best.size(); ++j)
    REQUIRE(best[j] >= 0 && best[j] < held && (j == 0 || best[j] > best[j - 1]));
  return 0;
}
