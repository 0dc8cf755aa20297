// Arrays carved out of one block of memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"

namespace herald {

// With a null block it only counts.
class Carver {
 public:
  explicit Carver(void* block) : block_(static_cast<char*>(block)) {}
  template <class T>
  T* take(int64_t count) {
    char* at = block_ ? block_ + used_ : nullptr;
    used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  char* block_;
  size_t used_ = 0;
};

}  // namespace herald
