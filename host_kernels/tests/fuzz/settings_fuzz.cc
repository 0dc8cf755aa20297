// What comes as text or as a number from outside: lists of CPUs, names, prefetch settings.
#include <stdexcept>

#include "numa.h"
#include "prefetch.h"
#include "shapes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  const herald::Prefetch wanted{static_cast<herald::Hint>(input.ConsumeIntegral<int>()),
                                input.ConsumeIntegral<int64_t>(), input.ConsumeIntegral<int>()};
  try {
    herald::set_prefetch(wanted);
    const herald::Prefetch got = herald::prefetch();
    REQUIRE(got.hint == wanted.hint && got.distance == wanted.distance &&
            got.streams == wanted.streams);
  } catch (const std::invalid_argument&) {
  }
  const std::string text = input.ConsumeRemainingBytesAsString();
  const herald::NodeCpus cpus = herald::parse_cpu_list(text);
  for (size_t i = 0; i < cpus.size(); ++i)
    REQUIRE(cpus[i] >= 0 && cpus[i] < 8192 && (i == 0 || cpus[i] > cpus[i - 1]));
  try {
    herald::choose_isa(text);
    REQUIRE(herald::active_table().name == text);
  } catch (const std::invalid_argument&) {
  }
  return 0;
}
