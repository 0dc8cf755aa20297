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
  s.leaf1_ecx = s.leaf7_ebx = s.leaf7_ecx = s.leaf7_edx = s.leaf7_sub1_eax = ~0u;
  s.xcr0 = xcr0;
  s.tiles_granted = true;
  return s;
}

// Each instruction set needs those before it: the first `count` names, and no more, are usable.
bool usable_set(const herald::CpuState& s, size_t count) {
  const std::vector<std::string> names{"scalar",      "avx2",        "avx512",
                                       "avx512_vnni", "avx512_bf16", "amx"};
  bool right = names == herald::isa_names();
  for (size_t i = 0; i < names.size(); ++i) right &= herald::usable(s, names[i]) == (i < count);
  return right;
}

void dispatch() {
  constexpr uint64_t kAll = 0x600e7;
  CHECK(usable_set(everything(kAll), 6));
  CHECK(usable_set(everything(0x000e7), 5));  // no tile state
  CHECK(usable_set(everything(0x200e7), 5));  // half of it
  CHECK(usable_set(everything(0x60007), 2));  // 512-bit state masked
  CHECK(usable_set(everything(0x60067), 2));  // upper sixteen registers masked
  CHECK(usable_set(everything(0x60003), 1));  // 256-bit state masked
  const auto without = [&](uint32_t herald::CpuState::* leaf, int flag) {
    herald::CpuState s = everything(kAll);
    s.*leaf &= ~(1u << flag);
    return s;
  };
  CHECK(usable_set(without(&herald::CpuState::leaf1_ecx, 27), 1));  // no XGETBV: XCR0 says nothing
  CHECK(usable_set(without(&herald::CpuState::leaf1_ecx, 12), 1));  // no FMA
  CHECK(usable_set(without(&herald::CpuState::leaf1_ecx, 28), 1));
  CHECK(usable_set(without(&herald::CpuState::leaf7_ebx, 5), 1));
  for (int flag : {16, 17, 30, 31})
    CHECK(usable_set(without(&herald::CpuState::leaf7_ebx, flag), 2), "bit %d", flag);
  CHECK(usable_set(without(&herald::CpuState::leaf7_ecx, 11), 3));
  CHECK(usable_set(without(&herald::CpuState::leaf7_sub1_eax, 5), 4));
  for (int flag : {22, 24, 25})
    CHECK(usable_set(without(&herald::CpuState::leaf7_edx, flag), 5), "bit %d", flag);
  herald::CpuState refused = everything(kAll);
  refused.tiles_granted = false;  // the system did not let this process use tiles
  CHECK(usable_set(refused, 5));
  CHECK(herald::compiled_table("scalar") && herald::available_isas().front() == "scalar");
  CHECK(!herald::compiled_table("sse9") && !herald::usable(everything(kAll), "sse9"));
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
