// What benchmarks compare the kernels with: a heap, and the roofs of the machine.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gil.h"
#include "heap.h"
#include "roof.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace herald {
namespace {

using Values = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Indices = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;

Indices py_heap_top_k(const Values& values, int64_t count) {
  const auto n = static_cast<int64_t>(values.size());
  if (count < 0 || count > n) throw std::invalid_argument("count must be between 0 and the values");
  auto found = std::make_unique<std::vector<int32_t>>();
  {
    WithoutGil nogil;
    *found = heap_top_k(values.data(), n, count);
  }
  int32_t* data = found->data();
  const size_t size = found->size();
  nb::capsule owner(found.get(),
                    [](void* p) noexcept { delete static_cast<std::vector<int32_t>*>(p); });
  found.release();
  return Indices(data, {size}, owner);
}

}  // namespace

void bind_roof(nb::module_& m) {
  m.def("heap_top_k", &py_heap_top_k, "values"_a.noconvert(), "count"_a);
  m.def(
      "compute_roof",
      [](const std::string& type, int threads) {
        const std::map<std::string, DType> types = {
            {"bf16", DType::kBFloat16}, {"float32", DType::kFloat32}, {"int8", DType::kInt8Index}};
        const auto found = types.find(type);
        if (found == types.end()) throw std::invalid_argument("type is bf16, float32 or int8");
        WithoutGil nogil;
        return compute_roof(found->second, threads);
      },
      "type"_a, "threads"_a);
  m.def("clock_rate", [] {
    WithoutGil nogil;
    return clock_rate();
  });
}

}  // namespace herald
