// What the fuzz targets share: calls that keep the contract, in blocks of exactly the right size,
// with contents of any kind.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "attend.h"
#include "cpu_features.h"

#define REQUIRE(condition) \
  do {                     \
    if (!(condition)) {    \
      __builtin_trap();    \
    }                      \
  } while (false)

namespace fuzz {

using herald::DType;

// Bytes for a block: the input's own, over and over, so that short inputs fill large blocks.
class Filler {
 public:
  explicit Filler(FuzzedDataProvider& input)
      : pattern_(input.ConsumeBytes<uint8_t>(input.ConsumeIntegralInRange<size_t>(0, 64))) {}

  template <class T>
  std::vector<T> block(int64_t count) {
    std::vector<T> values(static_cast<size_t>(count));
    auto* bytes = reinterpret_cast<uint8_t*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T) && !pattern_.empty(); ++i)
      bytes[i] = pattern_[(i + i / 251) % pattern_.size()];
    return values;
  }

 private:
  std::vector<uint8_t> pattern_;
};

inline void choose_isa(FuzzedDataProvider& input) {
  static const std::vector<std::string> names = herald::available_isas();
  herald::choose_isa(names[input.ConsumeIntegralInRange<size_t>(0, names.size() - 1)]);
}

// Mostly around tile edges, now and then across a chunk.
inline int64_t rows(FuzzedDataProvider& input) {
  return input.ConsumeIntegralInRange<int>(0, 19) == 0
             ? input.ConsumeIntegralInRange<int64_t>(4064, 4200)
             : input.ConsumeIntegralInRange<int64_t>(0, 130);
}

inline int64_t dim(FuzzedDataProvider& input) {
  return 16 * input.ConsumeIntegralInRange<int64_t>(1, 10);
}

}  // namespace fuzz
