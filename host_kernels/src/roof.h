// The roofs of this machine other than its memory: arithmetic, and the clock under it.
#pragma once

#include "kernel_table.h"

namespace herald {

// Operations per second of the scan's own multiply-adds on `threads` threads, on operands that
// never leave the registers. 0 where the instruction set has none for this type.
double compute_roof(DType dtype, int threads);

// Cycles per second of the calling thread's core, from a chain of one-cycle instructions.
double clock_rate();

}  // namespace herald
