#include "simd_avx512.h"
//
#include "bf16-inl.h"
//
#include "amx-inl.h"

namespace herald {
namespace {
using Bf16Scorer = AmxRowScorer;
template <class Codes>
using CodeScorer = AmxIndexScorer<Codes>;
}  // namespace
}  // namespace herald

#include "table-inl.h"

namespace herald {
const KernelTable kAmxTable = make_table("amx");
}  // namespace herald
