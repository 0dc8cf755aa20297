// Key indexes on every instruction set: what is written, and what a scan of it chooses.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cases.h"
#include "check.h"
#include "cpu_features.h"
#include "rows.h"

using cases::Case;
using herald::DType;

namespace {

std::vector<char> indexed(Case& c, DType kind, int threads) {
  const int64_t tiles = (c.rows() + herald::kTileRows - 1) / herald::kTileRows;
  std::vector<char> index(static_cast<size_t>(c.heads * tiles * herald::tile_bytes(kind, c.dim)));
  // In two pieces, the second of which begins within a tile.
  const auto half = static_cast<int32_t>(c.rows() / 2);
  for (int part = 0; part < 2; ++part) {
    const int32_t start = part ? half : 0;
    const int32_t count = part ? static_cast<int32_t>(c.rows()) - half : half;
    herald::index_rows({c.dtype,
                        kind,
                        {{c.storage.data(), c.rows()}},
                        {{index.data(), tiles * herald::kTileRows}},
                        c.heads,
                        c.dim,
                        &start,
                        &count,
                        threads});
  }
  return index;
}

// What the scan chooses, and its status.
std::vector<int32_t> chosen(Case& c, DType kind, std::vector<char>& index, int threads) {
  herald::AttendCall call = c.call(threads, false, false);
  const int64_t tile = herald::tile_bytes(kind, c.dim);
  const auto tiles = static_cast<int64_t>(index.size()) / c.heads / tile;
  call.dtype = kind;
  call.slots = {{index.data(), tiles * herald::kTileRows}};
  herald::attend_select(call);
  std::vector<int32_t> found = c.indices;
  found.push_back(c.status);
  return found;
}

void instruction_sets_agree(DType kind) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat32})
    for (int64_t rows : {0, 1, 31, 32, 33, 200, 4129})
      for (int64_t dim : {16, 48, 128})
        for (int64_t group : {1, 4, 20}) {
          Case c(dtype, 2, group, dim, rows, 7);
          std::vector<char> first;
          std::vector<int32_t> choice;
          for (const std::string& isa : check::isas()) {
            herald::choose_isa(isa);
            std::vector<char> index = indexed(c, kind, 2);
            const std::vector<int32_t> found = chosen(c, kind, index, 2);
            CHECK(found.back() == 0, "%s", isa.c_str());
            if (first.empty()) {
              first = index;
              choice = found;
            }
            CHECK(index == first, "%s rows %d dim %d", isa.c_str(), int(rows), int(dim));
            // Exponentials of several queries add up in another order.
            CHECK(group > 1 || found == choice, "%s rows %d dim %d", isa.c_str(), int(rows),
                  int(dim));
          }
        }
}

// A key that points where the query does stands out, wherever in a tile it is.
void finds_the_best(DType kind, const std::string& isa) {
  for (int64_t dim : {16, 48, 64, 128})
    for (int64_t best = 2; best < 72; ++best) {
      Case c(DType::kFloat32, 1, 1, dim, 75, 8);
      for (int64_t d = 0; d < dim; ++d) c.numbers[best * dim + d] = 4 * c.query[d];
      c.budget = 3;
      c.pack();
      std::vector<char> index = indexed(c, kind, 1);
      const std::vector<int32_t> found = chosen(c, kind, index, 1);
      CHECK(found[2] == best, "%s dim %d: %d, not %d", isa.c_str(), int(dim), found[2], int(best));
    }
}

void not_finite(DType kind, const std::string& isa) {
  for (float poison : {INFINITY, -INFINITY, NAN}) {
    Case c(DType::kFloat32, 2, 2, 32, 300, 9);
    c.numbers[123 * c.dim + 3] = poison;
    c.pack();
    std::vector<char> index = indexed(c, kind, 2);
    const char* tile = index.data() + 123 / herald::kTileRows * herald::tile_bytes(kind, c.dim);
    float scale;
    std::memcpy(&scale, tile + herald::code_bytes(kind, c.dim) + 123 % herald::kTileRows * 4, 4);
    CHECK(std::isnan(scale), "%s", isa.c_str());
    CHECK(chosen(c, kind, index, 2).back() == 1, "%s", isa.c_str());
  }
}

}  // namespace

int main() {
  for (DType kind : {DType::kInt8Index, DType::kInt4Index}) {
    instruction_sets_agree(kind);
    for (const std::string& isa : check::isas()) {
      herald::choose_isa(isa);
      finds_the_best(kind, isa);
      not_finite(kind, isa);
    }
  }
  return check::finish();
}
