#include "simd_scalar.h"
//
#include "index-inl.h"
#include "score-inl.h"

namespace herald {
namespace {
using Bf16Dot = PlainDot<uint16_t>;
using Bf16Scorer = RowScorer<Bf16Dot>;
template <class Codes>
using CodeScorer = IndexScorer<PlainIndexDot, Codes>;
}  // namespace
}  // namespace herald

#include "table-inl.h"

namespace herald {
const KernelTable kScalarTable = make_table("scalar");
}  // namespace herald
