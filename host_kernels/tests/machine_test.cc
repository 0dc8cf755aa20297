// Instruction sets, arena and bandwidth.
#include <stdexcept>
#include <string>

#include "arena.h"
#include "bandwidth.h"
#include "check.h"
#include "cpu_features.h"

namespace {

// A CPU that has everything, under a system that saves the registers of `xcr0` only.
herald::CpuState everything(uint64_t xcr0) {
  herald::CpuState s;
  s.leaf1_ecx = s.leaf7_ebx = s.leaf7_sub1_eax = ~0u;
  s.xcr0 = xcr0;
  return s;
}

bool usable_set(const herald::CpuState& s, bool avx2, bool avx512, bool bf16) {
  return herald::usable(s, "scalar") && herald::usable(s, "avx2") == avx2 &&
         herald::usable(s, "avx512") == avx512 && herald::usable(s, "avx512_bf16") == bf16;
}

void dispatch() {
  CHECK(usable_set(everything(0xe7), true, true, true));
  CHECK(usable_set(everything(0x07), true, false, false));   // 512-bit state masked
  CHECK(usable_set(everything(0x67), true, false, false));   // upper sixteen registers masked
  CHECK(usable_set(everything(0x03), false, false, false));  // 256-bit state masked
  herald::CpuState s = everything(0xe7);
  s.leaf1_ecx &= ~(1u << 27);  // no XGETBV: XCR0 means nothing
  CHECK(usable_set(s, false, false, false));
  s = everything(0xe7);
  s.leaf1_ecx &= ~(1u << 12);  // no FMA
  CHECK(usable_set(s, false, false, false));
  s = everything(0xe7);
  s.leaf7_sub1_eax = 0;
  CHECK(usable_set(s, true, true, false));
  for (int flag : {16, 17, 30, 31}) {
    s = everything(0xe7);
    s.leaf7_ebx &= ~(1u << flag);
    CHECK(usable_set(s, true, false, false), "bit %d", flag);
  }
  CHECK(herald::compiled_table("scalar") && herald::available_isas().front() == "scalar");
  CHECK(!herald::compiled_table("sse9") && !herald::usable(everything(0xe7), "sse9"));
}

void choice() {
  for (const std::string& isa : herald::available_isas()) {
    herald::choose_isa(isa);
    CHECK(herald::active_table().name == isa);
  }
  std::string message;
  try {
    herald::choose_isa("sse9");
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CHECK(message.find("'sse9' is not known") != std::string::npos, "%s", message.c_str());
}

void arena() {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{4096}, (size_t{2} << 20) + 1}) {
    const herald::Arena arena(bytes, bytes % 2 == 0, 2);
    CHECK(arena.bytes() == bytes);
    CHECK(reinterpret_cast<uintptr_t>(arena.data()) % (size_t{2} << 20) == 0);
    for (size_t i = 0; i < bytes; i += 4096) {
      CHECK(arena.data()[i] == 0);
      arena.data()[i] = 1;
    }
  }
  for (size_t bytes : {size_t{1} << 60, ~size_t{0}}) {
    bool refused = false;
    try {
      herald::Arena(bytes, true, 2);
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    CHECK(refused);
  }
}

void bandwidth() {
  std::vector<char> from(1 << 20, 3), to(1 << 20, 0);
  CHECK(herald::read_bandwidth(from.data(), from.size(), 2, 2) > 0);
  CHECK(herald::copy_bandwidth(from.data(), to.data(), from.size(), 2, 2) > 0);
  CHECK(from == to);
}

}  // namespace

int main() {
  dispatch();
  arena();
  bandwidth();
  choice();
  return check::finish();
}
