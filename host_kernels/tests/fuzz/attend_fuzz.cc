// attend_select over rows and over index tiles: any shape that the contract allows, any contents.
#include <algorithm>
#include <cmath>

#include "shapes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fuzz;
  FuzzedDataProvider input(data, size);
  choose_isa(input);
  herald::AttendCall call;
  const int kind = input.ConsumeIntegralInRange<int>(0, 3);
  call.dtype = static_cast<DType>(kind);
  const bool indexed = herald::is_index(call.dtype);
  const int64_t slots = input.ConsumeIntegralInRange<int64_t>(1, 3);
  call.heads = input.ConsumeIntegralInRange<int64_t>(1, 3);
  call.group = input.ConsumeIntegralInRange<int64_t>(1, 20);
  call.dim = dim(input);
  call.sinks = input.ConsumeIntegralInRange<int64_t>(0, 40);
  call.recent = input.ConsumeIntegralInRange<int64_t>(0, 40);
  call.scale = input.ConsumeFloatingPoint<float>();
  const bool with_self = !indexed && input.ConsumeBool(),
             with_output = !indexed && input.ConsumeBool();
  const bool with_elsewhere = input.ConsumeBool();

  std::vector<std::vector<char>> storage;
  std::vector<int32_t> attend_len, select_len, budget;
  int32_t most = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t count = indexed ? (rows(input) + 31) / 32 * 32 : rows(input);
    const int64_t bytes = indexed
                              ? count / herald::kTileRows * herald::tile_bytes(call.dtype, call.dim)
                              : 2 * count * call.dim * herald::item_size(call.dtype);
    storage.push_back(Filler(input).block<char>(call.heads * bytes));
    call.slots.push_back({storage.back().data(), count});
    attend_len.push_back(input.ConsumeIntegralInRange<int32_t>(0, static_cast<int32_t>(count)));
    select_len.push_back(input.ConsumeIntegralInRange<int32_t>(0, attend_len.back()));
    budget.push_back(input.ConsumeIntegralInRange<int32_t>(0, select_len.back()));
    most = std::max(most, budget.back());
  }
  call.capacity = most + input.ConsumeIntegralInRange<int64_t>(0, 2);
  call.attend_len = attend_len.data();
  call.select_len = select_len.data();
  call.budget = budget.data();
  Filler filler(input);
  const int64_t outputs = slots * call.heads * call.group * call.dim;
  const auto query = filler.block<float>(outputs);
  const auto self = filler.block<float>(with_self ? slots * call.heads * call.dim : 0);
  const auto elsewhere = filler.block<float>(with_elsewhere ? slots * call.heads * call.group : 0);
  call.query = query.data();
  if (with_self) call.self_key = call.self_value = self.data();
  if (with_elsewhere) call.elsewhere = elsewhere.data();

  std::vector<int32_t> first_indices;
  std::vector<float> first_output;
  for (int threads : {1, 3}) {
    std::vector<int32_t> indices(static_cast<size_t>(slots * call.heads * call.capacity), -7);
    std::vector<int32_t> status(static_cast<size_t>(slots), -7);
    std::vector<float> output(static_cast<size_t>(with_output ? outputs : 0));
    call.indices = indices.data();
    call.status = status.data();
    if (with_output) call.output = output.data();
    call.threads = threads;
    herald::attend_select(call);
    for (int64_t slot = 0; slot < slots; ++slot) {
      const auto at = static_cast<size_t>(slot);
      REQUIRE(status[at] == 0 || status[at] == 1);
      for (int64_t head = 0; head < call.heads; ++head) {
        const int32_t* row = indices.data() + (slot * call.heads + head) * call.capacity;
        for (int64_t j = 0; j < call.capacity; ++j) {
          if (j >= budget[at]) {
            REQUIRE(row[j] == -1);
          } else {
            REQUIRE(row[j] >= 0 && row[j] < select_len[at] && (j == 0 || row[j] > row[j - 1]));
            REQUIRE(j >= call.sinks || row[j] == j);
          }
        }
      }
    }
    for (float x : output) REQUIRE(std::isfinite(x));
    if (threads == 1) {
      first_indices = indices;
      first_output = output;
    }
    REQUIRE(indices == first_indices && output == first_output);
  }
  return 0;
}
