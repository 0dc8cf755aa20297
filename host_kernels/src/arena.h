// Host memory of our own: one anonymous mapping, huge pages where the system grants them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace herald {

class Arena {
 public:
  // Maps `bytes`, aligned to 2 MiB, and touches every page from `threads` threads, stripe by
  // stripe, so that pages land near the threads that will read them. Throws std::bad_alloc when
  // the mapping is refused.
  Arena(size_t bytes, bool huge_pages, int threads);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Bytes that huge pages back; -1 when the system does not tell.
  int64_t huge_bytes() const { return huge_bytes_; }
  // Whether the system backs the arena with huge pages, as far as it tells.
  bool huge_pages() const { return huge_bytes_ != 0; }
  // Why not all of it, or empty. Only asked for when huge pages were.
  const std::string& notice() const { return notice_; }

 private:
  char* data_ = nullptr;
  size_t bytes_;
  size_t mapped_ = 0;
  int64_t huge_bytes_ = 0;
  std::string notice_;
};

// The pool's participant that touched the page at `address` first, or -1 outside every arena.
int owner(const void* address);

}  // namespace herald
