#include "cpu_features.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace herald {
namespace {

constexpr bool bit(uint64_t word, int index) { return word >> index & 1; }

std::atomic<const KernelTable*> chosen{nullptr};

// Asks for the tile registers (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA), for all threads.
bool request_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

const CpuState& this_cpu() {
  static const CpuState state = read_cpu_state();
  return state;
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

CpuState read_cpu_state() {
  CpuState s;
#if defined(__x86_64__)
  uint32_t a = 0, b = 0, c = 0, d = 0;
  char text[49] = {};
  if (__get_cpuid(0, &a, &b, &c, &d)) {
    std::memcpy(text, &b, 4);
    std::memcpy(text + 4, &d, 4);
    std::memcpy(text + 8, &c, 4);
    s.vendor.assign(text, 12);
  }
  if (__get_cpuid(1, &a, &b, &c, &d)) s.leaf1_ecx = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    s.leaf7_ebx = b;
    s.leaf7_ecx = c;
    s.leaf7_edx = d;
    const uint32_t subleaves = a;
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) s.leaf7_sub1_eax = a;
  }
  if (bit(s.leaf1_ecx, 27)) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    s.xcr0 = static_cast<uint64_t>(high) << 32 | low;
  }
  // Not every kernel knows the request, and asking where the CPU has no tiles would be in vain.
  if (bit(s.leaf7_edx, 24) && (s.xcr0 & 0x60000) == 0x60000) s.tiles_granted = request_tiles();
  std::memset(text, 0, sizeof text);
  for (uint32_t i = 0; i < 3; ++i) {
    if (!__get_cpuid(0x80000002 + i, &a, &b, &c, &d)) break;
    const uint32_t words[4] = {a, b, c, d};
    std::memcpy(text + 16 * i, words, 16);
  }
  s.model = text;
#endif
  return s;
}

bool usable(const CpuState& cpu, const std::string& isa) {
  if (isa == "scalar") return true;
  const bool ymm = bit(cpu.leaf1_ecx, 27) && (cpu.xcr0 & 0x06) == 0x06;
  const bool zmm = ymm && (cpu.xcr0 & 0xe0) == 0xe0;
  const bool avx2 =
      ymm && bit(cpu.leaf1_ecx, 12) && bit(cpu.leaf1_ecx, 28) && bit(cpu.leaf7_ebx, 5);
  if (isa == "avx2") return avx2;
  const bool avx512 = avx2 && zmm && bit(cpu.leaf7_ebx, 16) && bit(cpu.leaf7_ebx, 17) &&
                      bit(cpu.leaf7_ebx, 30) && bit(cpu.leaf7_ebx, 31);
  if (isa == "avx512") return avx512;
  const bool vnni = avx512 && bit(cpu.leaf7_ecx, 11);
  if (isa == "avx512_vnni") return vnni;
  const bool bf16 = vnni && bit(cpu.leaf7_sub1_eax, 5);
  if (isa == "avx512_bf16") return bf16;
  if (isa == "amx")
    return bf16 && bit(cpu.leaf7_edx, 22) && bit(cpu.leaf7_edx, 24) && bit(cpu.leaf7_edx, 25) &&
           (cpu.xcr0 & 0x60000) == 0x60000 && cpu.tiles_granted;
  return false;
}

const std::vector<std::string>& isa_names() {
  static const std::vector<std::string> names{"scalar",      "avx2",        "avx512",
                                              "avx512_vnni", "avx512_bf16", "amx"};
  return names;
}

const KernelTable* compiled_table(const std::string& isa) {
  if (isa == "scalar") return &kScalarTable;
#if defined(HERALD_HAVE_AVX2)
  if (isa == "avx2") return &kAvx2Table;
#endif
#if defined(HERALD_HAVE_AVX512)
  if (isa == "avx512") return &kAvx512Table;
#endif
#if defined(HERALD_HAVE_AVX512_VNNI)
  if (isa == "avx512_vnni") return &kAvx512VnniTable;
#endif
#if defined(HERALD_HAVE_AMX)
  if (isa == "amx") return &kAmxTable;
#endif
#if defined(HERALD_HAVE_AVX512_BF16)
  if (isa == "avx512_bf16") return &kAvx512Bf16Table;
#endif
  return nullptr;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const auto& name : isa_names())
    if (compiled_table(name) && usable(this_cpu(), name)) names.push_back(name);
  return names;
}

void choose_isa(const std::string& isa) {
  bool known = false;
  for (const auto& name : isa_names()) known |= name == isa;
  const char* reason = nullptr;
  if (!known)
    reason = "is not known";
  else if (!compiled_table(isa))
    reason = "was left out of this build";
  else if (!usable(this_cpu(), isa))
    reason = "is not offered by this CPU and operating system";
  if (reason)
    throw std::invalid_argument("instruction set '" + isa + "' " + reason +
                                "; available here: " + join(available_isas()));
  chosen = compiled_table(isa);
}

const KernelTable& active_table() {
  if (const KernelTable* table = chosen) return *table;
  static const KernelTable* const best = compiled_table(available_isas().back());
  return *best;
}

}  // namespace herald
