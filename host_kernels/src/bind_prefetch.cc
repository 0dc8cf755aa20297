// Prefetch settings and their measurement, as prefetch.py uses them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "gil.h"
#include "prefetch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace herald {

void bind_prefetch(nb::module_& m) {
  using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  m.def("prefetch", [] {
    const Prefetch p = prefetch();
    return std::tuple<int, int64_t, int>(static_cast<int>(p.hint), p.distance, p.streams);
  });
  m.def(
      "set_prefetch",
      [](int hint, int64_t distance, int streams) {
        set_prefetch({static_cast<Hint>(hint), distance, streams});
      },
      "hint"_a, "distance"_a, "streams"_a);
  m.def(
      "cold_scan_rate",
      [](const Bytes& buffer, int hint, int64_t distance, int streams, int threads) {
        WithoutGil nogil;
        return cold_scan_rate(reinterpret_cast<char*>(buffer.data()), buffer.size(),
                              {static_cast<Hint>(hint), distance, streams}, threads);
      },
      "buffer"_a.noconvert(), "hint"_a, "distance"_a, "streams"_a, "threads"_a);
}

}  // namespace herald
