#include "simd_avx512.h"
//
#include "score-inl.h"

namespace herald {
namespace {
using Bf16Dot = PlainDot<uint16_t>;
}  // namespace
}  // namespace herald

#include "table-inl.h"

namespace herald {
const KernelTable kAvx512Table = make_table("avx512");
}  // namespace herald
