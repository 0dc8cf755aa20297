#include "heap.h"

#include <algorithm>

namespace herald {
namespace {

struct Entry {
  float value;
  int32_t index;
};

// True if `a` outranks `b`, so that the front of a heap is the entry to give up first.
bool outranks(const Entry& a, const Entry& b) {
  return a.value != b.value ? a.value > b.value : a.index < b.index;
}

}  // namespace

std::vector<int32_t> heap_top_k(const float* values, int64_t n, int64_t count) {
  std::vector<Entry> heap;
  heap.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < n && count > 0; ++i) {
    const Entry entry{values[i], static_cast<int32_t>(i)};
    if (i >= count) {
      if (!outranks(entry, heap.front())) continue;
      std::pop_heap(heap.begin(), heap.end(), outranks);
      heap.pop_back();
    }
    heap.push_back(entry);
    std::push_heap(heap.begin(), heap.end(), outranks);
  }
  std::vector<int32_t> indices;
  indices.reserve(heap.size());
  for (const Entry& entry : heap) indices.push_back(entry.index);
  return indices;
}

}  // namespace herald
