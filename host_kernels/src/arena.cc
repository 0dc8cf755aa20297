#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "thread_pool.h"

namespace herald {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallPage = 4096;
// Stripes go round the participants, so that the rows of one request, which lie together, are
// near all of them. Longer than one head's keys of 64K positions, so that few units straddle two.
constexpr size_t kStripe = 16 * kHugePage;

struct Touched {
  uintptr_t end;
  size_t stripe;
  size_t threads;
};

// Never destroyed: an arena may be freed by a static destructor.
struct Registry {
  std::shared_mutex mutex;
  std::map<uintptr_t, Touched> arenas;
};

Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

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

std::string why_not(int64_t granted, size_t mapped) {
  std::string setting;
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::getline(file, setting);
  if (setting.find("[never]") != std::string::npos)
    return "transparent huge pages are switched off (/sys/kernel/mm/transparent_hugepage/enabled "
           "says never; madvise would do)";
  return "the system gave huge pages for " + std::to_string(granted >> 20) + " of " +
         std::to_string(mapped >> 20) + " MiB";
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
  const int refused = madvise(data_, mapped_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  const int reason = errno;

  {
    PoolLease lease(threads);
    const size_t count = static_cast<size_t>(lease.threads());
    const size_t share = (mapped_ / kHugePage + count - 1) / count * kHugePage;
    const size_t stripe = std::min(share, kStripe);
    lease.run([&](int index) {
      for (size_t i = static_cast<size_t>(index); i * stripe < mapped_; i += count) {
        const size_t end = std::min(mapped_, (i + 1) * stripe);
        for (size_t at = i * stripe; at < end; at += kSmallPage)
          static_cast<volatile char*>(data_)[at] = 0;
      }
    });
    std::unique_lock<std::shared_mutex> lock(registry().mutex);
    registry().arenas[aligned] = {aligned + mapped_, stripe, count};
  }
  if (!huge_pages) return;
  huge_bytes_ = refused ? 0 : huge_bytes_at(aligned);
  if (refused)
    notice_ = std::string("the system refuses them: ") + std::strerror(reason);
  else if (huge_bytes_ >= 0 && huge_bytes_ < static_cast<int64_t>(mapped_))
    notice_ = why_not(huge_bytes_, mapped_);
}

Arena::~Arena() {
  if (!data_) return;
  {
    std::unique_lock<std::shared_mutex> lock(registry().mutex);
    registry().arenas.erase(reinterpret_cast<uintptr_t>(data_));
  }
  munmap(data_, mapped_);
}

int owner(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::shared_lock<std::shared_mutex> lock(registry().mutex);
  auto found = registry().arenas.upper_bound(at);
  if (found == registry().arenas.begin()) return -1;
  --found;
  const Touched& t = found->second;
  if (at >= t.end) return -1;
  return static_cast<int>((at - found->first) / t.stripe % t.threads);
}

}  // namespace herald
