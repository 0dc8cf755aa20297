#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <new>
#include <string>

#include "thread_pool.h"

namespace herald {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallPage = 4096;

// Bytes of huge pages behind the mapping that contains `address`, or -1 when the system is silent.
int64_t huge_bytes_at(uintptr_t address) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(maps, line)) {
    unsigned long long first, last;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &first, &last) == 2) {
      inside = first <= address && address < last;
    } else if (inside) {
      unsigned long long kilobytes;
      if (std::sscanf(line.c_str(), "AnonHugePages: %llu kB", &kilobytes) == 1)
        return static_cast<int64_t>(kilobytes * 1024);
    }
  }
  return -1;
}

}  // namespace

Arena::Arena(size_t bytes, bool huge_pages, int threads) : bytes_(bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
  const size_t wanted = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* raw =
      mmap(nullptr, wanted + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  // Give back what lies before and after the aligned part.
  const auto start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > start) munmap(raw, aligned - start);
  if (const size_t rest = start + kHugePage - aligned)
    munmap(reinterpret_cast<void*>(aligned + wanted), rest);
  data_ = reinterpret_cast<char*>(aligned);
  mapped_ = wanted;
  const bool advised =
      madvise(data_, mapped_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) == 0 && huge_pages;

  PoolLease lease(threads);
  const size_t pages = mapped_ / kHugePage, count = static_cast<size_t>(lease.threads());
  lease.run([&](int index) {
    const size_t i = static_cast<size_t>(index);
    const size_t end = pages * (i + 1) / count * kHugePage;
    for (size_t at = pages * i / count * kHugePage; at < end; at += kSmallPage)
      static_cast<volatile char*>(data_)[at] = 0;
  });
  const int64_t granted = advised ? huge_bytes_at(aligned) : 0;
  huge_ = advised && granted != 0;
}

Arena::~Arena() {
  if (data_) munmap(data_, mapped_);
}

}  // namespace herald
