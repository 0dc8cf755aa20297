// Copies selected rows out of host memory that is mapped for the device, as host_kernels.gather does
// on the host:
//
//   keys[n, offset + j, h] = extent n [h, 0, indices[n, h, j]] for j < counts[n], values from [h, 1].
//
// An index outside its extent leaves its row as it was.
//
// The link is slow to answer, so many reads must be under way at once; few threads are enough for
// that, and the rest of the device is left to others. `lanes` neighbouring threads copy a row, 16
// bytes each, ROWS rows of a head at a time.
struct Slot {
  const uint4* rows;  // extent [heads, 2, span, lanes]
  int span;           // rows of the extent
  int count;          // rows wanted of every head
};

struct Slots {
  Slot at[SLOTS];
};

extern "C" __global__ void __launch_bounds__(THREADS) read_rows(
    const __grid_constant__ Slots slots, const int* indices,  // [count, heads, capacity]
    int count, int heads, int capacity, int lanes,
    uint4* keys, uint4* values,  // [count, pool_rows, heads, lanes]
    int pool_rows, int offset) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
  const int lane = thread % lanes, workers = all / lanes;
  if (thread / lanes >= workers) return;
  const int groups = (capacity + ROWS - 1) / ROWS, tasks = count * heads * groups;
  for (int task = thread / lanes; task < tasks; task += workers) {
    const int first = task % groups * ROWS, head = task / groups % heads;
    const int n = task / groups / heads;
    const int wanted = slots.at[n].count - first, span = slots.at[n].span;
    if (wanted <= 0) continue;
    const long long plane = static_cast<long long>(span) * lanes;
    const uint4* from = slots.at[n].rows + 2 * head * plane + lane;
    const int* index = indices + static_cast<long long>(n * heads + head) * capacity + first;
    uint4 key[ROWS], value[ROWS];
    bool there[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int row = i < wanted ? index[i] : -1;
      there[i] = row >= 0 && row < span;
      if (!there[i]) continue;
      const uint4* at = from + static_cast<long long>(row) * lanes;
      key[i] = __ldcs(at);
      value[i] = __ldcs(at + plane);
    }
    const long long to = (static_cast<long long>(n) * pool_rows + offset + first) * heads + head;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (!there[i]) continue;
      const long long at = (to + static_cast<long long>(i) * heads) * lanes + lane;
      keys[at] = key[i];
      values[at] = value[i];
    }
  }
}
