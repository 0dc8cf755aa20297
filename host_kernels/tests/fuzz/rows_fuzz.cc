// Gather, store and the building of an index: valid shapes, any contents, any indices.
#include <algorithm>

#include "rows.h"
#include "shapes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fuzz;
  FuzzedDataProvider input(data, size);
  choose_isa(input);
  const DType dtype = input.ConsumeBool() ? DType::kBFloat16 : DType::kFloat32;
  const DType kind = input.ConsumeBool() ? DType::kInt8Index : DType::kInt4Index;
  const int64_t slots = input.ConsumeIntegralInRange<int64_t>(1, 3);
  const int64_t heads = input.ConsumeIntegralInRange<int64_t>(1, 3), width = dim(input);
  const int threads = input.ConsumeIntegralInRange<int>(1, 3);
  const int64_t bytes = width * herald::item_size(dtype);

  std::vector<std::vector<char>> storage, tiles;
  std::vector<herald::Extent> extents, index;
  std::vector<int32_t> start, counts;
  int64_t most = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t held = rows(input), padded = (held + 31) / 32 * 32;
    storage.push_back(Filler(input).block<char>(heads * 2 * held * bytes));
    tiles.emplace_back(
        static_cast<size_t>(heads * padded / herald::kTileRows * herald::tile_bytes(kind, width)));
    extents.push_back({storage.back().data(), held});
    index.push_back({tiles.back().data(), padded});
    counts.push_back(input.ConsumeIntegralInRange<int32_t>(0, static_cast<int32_t>(held)));
    start.push_back(
        input.ConsumeIntegralInRange<int32_t>(0, static_cast<int32_t>(held) - counts.back()));
    most = std::max<int64_t>(most, counts.back());
  }
  const int64_t capacity = most + input.ConsumeIntegralInRange<int64_t>(0, 2);
  const int64_t offset = input.ConsumeIntegralInRange<int64_t>(0, 3);
  auto indices = Filler(input).block<int32_t>(slots * heads * capacity);
  if (input.ConsumeBool())  // else they stay as they came, most of them out of bounds
    for (int64_t i = 0; i < slots * heads * capacity; ++i) {
      const auto held = static_cast<uint32_t>(extents[i / (heads * capacity)].rows);
      if (held) indices[i] = static_cast<int32_t>(static_cast<uint32_t>(indices[i]) % held);
    }
  std::vector<char> keys(static_cast<size_t>(slots * (offset + most) * heads * bytes));
  std::vector<char> values(keys.size());
  const herald::GatherCall gather{dtype,          extents,       heads,         width,
                                  indices.data(), capacity,      counts.data(), keys.data(),
                                  values.data(),  offset + most, offset,        threads};
  const herald::BadIndex bad =
      herald::find_bad_index({extents, heads, indices.data(), capacity, counts.data()});
  bool outside = false;
  for (int64_t slot = 0; slot < slots; ++slot)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t j = 0; j < counts[static_cast<size_t>(slot)]; ++j) {
        const int32_t row = indices[(slot * heads + head) * capacity + j];
        outside |= row < 0 || row >= extents[static_cast<size_t>(slot)].rows;
      }
  REQUIRE(bad.found == outside);
  if (!bad.found) herald::gather(gather);

  herald::index_rows(
      {dtype, kind, extents, index, heads, width, start.data(), counts.data(), threads});
  herald::store({dtype, extents, heads, width, start.data(), counts.data(), keys.data(),
                 values.data(), offset + most, threads});
  return 0;
}
