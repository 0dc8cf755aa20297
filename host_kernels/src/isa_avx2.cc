#include "simd_avx2.h"
//
#include "score-inl.h"

namespace herald {
namespace {
using Bf16Dot = PlainDot<uint16_t>;
}  // namespace
}  // namespace herald

#include "table-inl.h"

namespace herald {
const KernelTable kAvx2Table = make_table("avx2");
}  // namespace herald
