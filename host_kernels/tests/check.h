// The smallest test harness that does: CHECK reports and counts, finish() is main's exit status.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "cpu_features.h"

namespace check {

inline int failures = 0;

// The instruction sets to test. The thread sanitizer looks for races, of which no set has its own.
inline std::vector<std::string> isas() {
  std::vector<std::string> names = herald::available_isas();
#if defined(__SANITIZE_THREAD__)
  names = {names.back()};
#endif
  return names;
}

inline int finish() {
  if (failures) std::fprintf(stderr, "%d checks failed\n", failures);
  return failures ? 1 : 0;
}

}  // namespace check

#define CHECK(condition, ...)                                             \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ++check::failures;                                                  \
      std::fprintf(stderr, "%s:%d: %s:", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, " " __VA_ARGS__);                              \
      std::fprintf(stderr, "\n");                                         \
    }                                                                     \
  } while (0)
