// Host memory of our own: one anonymous mapping, huge pages where the system grants them.
#pragma once

#include <cstddef>

namespace herald {

class Arena {
 public:
  // Maps `bytes`, aligned to 2 MiB, and touches every page from `threads` threads, so that pages
  // land near the threads that will read them. Throws std::bad_alloc when the mapping is refused.
  Arena(size_t bytes, bool huge_pages, int threads);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Whether the system backs the arena with huge pages, as far as it tells.
  bool huge_pages() const { return huge_; }

 private:
  char* data_ = nullptr;
  size_t bytes_;
  size_t mapped_ = 0;
  bool huge_ = false;
};

}  // namespace herald
