#include "simd_avx512.h"
//
#include "index-inl.h"
#include "score-inl.h"
#include "vnni-inl.h"

namespace herald {
namespace {
using Bf16Dot = PlainDot<uint16_t>;
using Bf16Scorer = RowScorer<Bf16Dot>;
template <class Codes>
using CodeScorer = IndexScorer<VnniIndexDot, Codes>;
}  // namespace
}  // namespace herald

#include "table-inl.h"

namespace herald {
const KernelTable kAvx512VnniTable = make_table("avx512_vnni");
}  // namespace herald
