// Gather and store against plain loops; nothing else may change.
#include "rows.h"

#include <cstring>
#include <string>

#include "check.h"
#include "cpu_features.h"

using herald::DType;

namespace {

void round_trip(DType dtype, int64_t dim, int64_t rows, int32_t count, int threads) {
  const int64_t heads = 3, bytes = dim * herald::item_size(dtype), offset = 2, after = 1;
  const int64_t buffer_rows = offset + count + after;
  std::vector<char> extent(static_cast<size_t>(heads * rows * 2 * bytes), 'x');
  std::vector<char> keys(static_cast<size_t>(count * heads * bytes)), values(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<char>(i * 7 % 100);
    values[i] = static_cast<char>(i * 13 % 100);
  }
  const int32_t start = static_cast<int32_t>(rows - count);
  herald::store({dtype,
                 {{extent.data(), rows}},
                 heads,
                 dim,
                 &start,
                 &count,
                 keys.data(),
                 values.data(),
                 count,
                 threads});
  for (int64_t r = 0; r < start; ++r) CHECK(extent[r * bytes] == 'x', "row %d", int(r));

  // Every stored row, in reverse, comes back where the offset says.
  std::vector<int32_t> indices(static_cast<size_t>(heads * count));
  for (int64_t i = 0; i < heads * count; ++i)
    indices[i] = static_cast<int32_t>(rows - 1 - i % count);
  std::vector<char> out_k(static_cast<size_t>(buffer_rows * heads * bytes), 'y'), out_v = out_k;
  herald::GatherCall call{dtype,          {{extent.data(), rows}},
                          heads,          dim,
                          indices.data(), count,
                          &count,         out_k.data(),
                          out_v.data(),   buffer_rows,
                          offset,         threads};
  const herald::RowLists lists{call.slots, heads, indices.data(), count, &count};
  CHECK(!herald::find_bad_index(lists).found);
  herald::gather(call);
  const int64_t row_bytes = heads * bytes;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t from = (count - 1 - j) * row_bytes, to = (offset + j) * row_bytes;
    CHECK(!std::memcmp(out_k.data() + to, keys.data() + from, row_bytes), "row %d", int(j));
    CHECK(!std::memcmp(out_v.data() + to, values.data() + from, row_bytes), "row %d", int(j));
  }
  for (int64_t i = 0; i < offset * row_bytes; ++i) CHECK(out_k[i] == 'y' && out_v[i] == 'y');
  for (int64_t i = (offset + count) * row_bytes; i < buffer_rows * row_bytes; ++i)
    CHECK(out_k[i] == 'y' && out_v[i] == 'y');

  if (count == 0) return;
  for (int32_t bad : {-1, static_cast<int32_t>(rows)}) {
    indices.back() = bad;
    const herald::BadIndex found = herald::find_bad_index(lists);
    CHECK(found.found && found.slot == 0 && found.head == heads - 1 && found.position == count - 1);
  }
}

}  // namespace

int main() {
  for (const std::string& isa : check::isas()) {
    herald::choose_isa(isa);
    for (DType dtype : {DType::kBFloat16, DType::kFloat32})
      for (int64_t dim : {16, 48, 128})
        for (int32_t count : {0, 1, 15, 16, 17, 255, 256, 257})
          round_trip(dtype, dim, count + 5, count, 1 + count % 3);
  }
  return check::finish();
}
