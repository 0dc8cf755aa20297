#include "simd_scalar.h"
//
#include "score-inl.h"

namespace herald {
namespace {
using Bf16Dot = PlainDot<uint16_t>;
}  // namespace
}  // namespace herald

#include "table-inl.h"

namespace herald {
const KernelTable kScalarTable = make_table("scalar");
}  // namespace herald
