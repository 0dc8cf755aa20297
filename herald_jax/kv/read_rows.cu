// Copies selected rows out of host memory that is mapped for the device, as host_kernels.gather does
// on the host:
//
//   keys[n, offset + j, h] = extent n [h, 0, indices[n, h, j]] for j < counts[n], values from [h, 1].
//
// An index outside its extent leaves its row as it was.
//
// The link is slow to answer, so many reads must be under way at once; few threads are enough for
// that, and the rest of the device is left to others. `lanes` neighbouring threads copy a row, 16
// bytes each, and go on with the next kRows rows of the same head together.
constexpr int kRows = 8;

struct Slot {
  const uint4* rows;  // extent [heads, 2, span, lanes]
  long long span;     // rows of the extent
  int count;          // rows wanted of every head
};

extern "C" __global__ void read_rows(
    const unsigned long long* extents, const long long* spans, const int* counts,
    const int* indices,  // [slots, heads, capacity]
    int slots, int heads, int capacity, int lanes,
    uint4* keys, uint4* values,  // [slots, pool_rows, heads, lanes]
    int pool_rows, int offset) {
  extern __shared__ Slot known[];
  for (int n = threadIdx.x; n < slots; n += blockDim.x)
    known[n] = {reinterpret_cast<const uint4*>(extents[n]), spans[n], counts[n]};
  __syncthreads();

  const int thread = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
  const int lane = thread % lanes, workers = all / lanes;
  if (thread / lanes >= workers) return;
  const int groups = (capacity + kRows - 1) / kRows, tasks = slots * heads * groups;
  for (int task = thread / lanes; task < tasks; task += workers) {
    const int first = task % groups * kRows, head = task / groups % heads;
    const int n = task / groups / heads;
    const int count = known[n].count - first;
    if (count <= 0) continue;
    const uint4* from_keys = known[n].rows + 2 * head * known[n].span * lanes + lane;
    const uint4* from_values = from_keys + known[n].span * lanes;
    const int* wanted = indices + static_cast<long long>(n * heads + head) * capacity + first;
    uint4 key[kRows], value[kRows];
    bool there[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const long long row = i < count ? wanted[i] : -1;
      there[i] = row >= 0 && row < known[n].span;
      if (!there[i]) continue;
      key[i] = __ldcs(from_keys + row * lanes);
      value[i] = __ldcs(from_values + row * lanes);
    }
    const long long to = ((static_cast<long long>(n) * pool_rows + offset + first) * heads + head);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!there[i]) continue;
      const long long at = (to + static_cast<long long>(i) * heads) * lanes + lane;
      keys[at] = key[i];
      values[at] = value[i];
    }
  }
}
