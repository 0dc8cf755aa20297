// What the CPU has and the operating system has switched on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_table.h"

namespace herald {

// The raw answers of CPUID and XGETBV, so that the decision can be tested on any machine.
struct CpuState {
  uint32_t leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0, leaf7_sub1_eax = 0;
  uint64_t xcr0 = 0;
  // Linux hands out the tile registers on request only.
  bool tiles_granted = false;
  std::string vendor, model;
};

CpuState read_cpu_state();

// An instruction set counts as usable when CPUID has it *and* XCR0 says that the operating system
// saves its registers: a hypervisor may mask either.
bool usable(const CpuState& cpu, const std::string& isa);

// Names this build knows, fastest last; compiled or not.
const std::vector<std::string>& isa_names();

// The variant of that name, or null when this build left it out.
const KernelTable* compiled_table(const std::string& isa);

// Names that are compiled and usable here, fastest last; "scalar" always first.
std::vector<std::string> available_isas();

// Chooses by name; throws std::invalid_argument with one sentence when that is not possible.
void choose_isa(const std::string& isa);

// The variant in use: the chosen one, else the fastest available.
const KernelTable& active_table();

}  // namespace herald
