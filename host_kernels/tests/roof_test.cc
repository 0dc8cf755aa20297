// Read loops and arithmetic roofs of every instruction set, and the heap against a stable sort.
#include "roof.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bandwidth.h"
#include "check.h"
#include "cpu_features.h"
#include "heap.h"

namespace {

// Whatever the streams and the prefetch, every whole line is read exactly once.
void read_loops(const herald::KernelTable& table) {
  std::mt19937_64 random(7);
  std::vector<char> data(64 * 256 + 64);
  for (char& c : data) c = static_cast<char>(random());
  for (int64_t offset : {0, 1, 40})
    for (int64_t lines : {0, 1, 2, 3, 5, 8, 63})
      for (int64_t rest : {0, 17}) {
        uint64_t want = 0;
        for (int64_t i = 0; i < lines * 256; i += 8) {
          uint64_t word;
          std::memcpy(&word, data.data() + offset + i, 8);
          want ^= word;
        }
        for (int64_t streams : {1, 2, 3, 4, 64})
          for (int64_t ahead : {0, 512, 4096})
            CHECK(
                table.read_bytes(data.data() + offset, lines * 256 + rest, streams, ahead) == want,
                "%s, %d lines, %d streams", table.name, static_cast<int>(lines),
                static_cast<int>(streams));
      }
}

void roofs(const herald::KernelTable& table) {
  for (herald::DType dtype :
       {herald::DType::kBFloat16, herald::DType::kFloat32, herald::DType::kInt8Index}) {
    float sum = 0;
    const int64_t one = table.multiply_adds(dtype, 1, &sum);
    CHECK(one > 0 || dtype == herald::DType::kInt8Index, "%s", table.name);
    CHECK(table.multiply_adds(dtype, 9, &sum) == 9 * one, "%s", table.name);
  }
}

void heap(int64_t n, int kinds) {
  std::mt19937_64 random(static_cast<uint64_t>(n + kinds));
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = static_cast<float>(random() % static_cast<uint64_t>(kinds));
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  for (int64_t count : {int64_t{0}, std::min<int64_t>(n, 1), n / 2, n}) {
    std::vector<int32_t> want(order.begin(), order.begin() + count);
    std::vector<int32_t> got = herald::heap_top_k(values.data(), n, count);
    std::sort(want.begin(), want.end());
    std::sort(got.begin(), got.end());
    CHECK(got == want, "%d of %d", static_cast<int>(count), static_cast<int>(n));
  }
}

}  // namespace

int main() {
  for (const std::string& isa : herald::available_isas()) {
    herald::choose_isa(isa);
    read_loops(*herald::compiled_table(isa));
    roofs(*herald::compiled_table(isa));
  }
  for (int64_t n : {0, 1, 2, 31, 1000})
    for (int kinds : {1, 4, 1 << 20}) heap(n, kinds);
  CHECK(herald::clock_rate() > 1e8);
  CHECK(herald::compute_roof(herald::DType::kFloat32, 2) > 1e6);
  return check::finish();
}
