// The Python face of the native code. The wrappers in host_kernels/ validate arguments; here only
// what memory safety needs is checked again. Every call releases the GIL while it works.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "arena.h"
#include "attend.h"
#include "attend_rows.h"
#include "bandwidth.h"
#include "changes.h"
#include "cpu_features.h"
#include "gil.h"
#include "rerank.h"
#include "rows.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace herald {

void bind_prefetch(nb::module_& m);
void bind_roof(nb::module_& m);

namespace {

// bf16 crosses as uint16, so two item types are all there is.
using Rows = nb::ndarray<nb::c_contig, nb::device::cpu>;
using RowsIn = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using FloatsIn = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using IntsIn = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<int32_t, nb::c_contig, nb::device::cpu>;
using BytesIn = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool fine, const char* what) {
  if (!fine) throw std::invalid_argument(what);
}

template <class Array>
DType dtype_of(const Array& array) {
  require(array.itemsize() == 2 || array.itemsize() == 4, "rows must be bf16 (as uint16) or fp32");
  return array.itemsize() == 2 ? DType::kBFloat16 : DType::kFloat32;
}

template <class Array>
std::vector<Extent> extents(const std::vector<Array>& kv, DType dtype, int64_t heads, int64_t dim) {
  std::vector<Extent> slots;
  slots.reserve(kv.size());
  for (const auto& array : kv) {
    require(array.ndim() == 4 && dtype_of(array) == dtype &&
                static_cast<int64_t>(array.shape(0)) == heads && array.shape(1) == 2 &&
                static_cast<int64_t>(array.shape(3)) == dim,
            "every extent must be [heads][2][rows][dim] of one type");
    slots.push_back({static_cast<char*>(const_cast<void*>(static_cast<const void*>(array.data()))),
                     static_cast<int64_t>(array.shape(2))});
  }
  return slots;
}

// Which index an array of tiles is; the two differ in bytes, whatever the head dimension.
DType index_of(const RowsIn& tiles, int64_t dim) {
  require(tiles.ndim() == 3 && tiles.itemsize() == 1, "an index must be uint8 with 3 axes");
  const auto bytes = static_cast<int64_t>(tiles.shape(2));
  return bytes == tile_bytes(DType::kInt4Index, dim) ? DType::kInt4Index : DType::kInt8Index;
}

std::vector<Extent> indexes(const std::vector<RowsIn>& index, DType kind, int64_t heads,
                            int64_t dim) {
  std::vector<Extent> slots;
  slots.reserve(index.size());
  for (const auto& array : index) {
    require(array.ndim() == 3 && array.itemsize() == 1 &&
                static_cast<int64_t>(array.shape(0)) == heads &&
                static_cast<int64_t>(array.shape(2)) == tile_bytes(kind, dim),
            "every index must be uint8 [heads][tiles][tile_bytes] of one kind");
    slots.push_back({static_cast<char*>(const_cast<void*>(static_cast<const void*>(array.data()))),
                     static_cast<int64_t>(array.shape(1)) * kTileRows});
  }
  return slots;
}

// query [N, H_kv * G, D]; output absent means keys only; kv of bytes is a key index.
void py_attend(const FloatsIn& query, const std::vector<RowsIn>& kv, int64_t heads,
               const IntsIn& attend_len, const IntsIn& select_len, const IntsIn& budget,
               const Ints& indices, int64_t sinks, int64_t recent,
               const std::optional<FloatsIn>& self_key, const std::optional<FloatsIn>& self_value,
               const std::optional<FloatsIn>& elsewhere, const std::optional<Floats>& log_rest,
               float scale, const std::optional<Floats>& output, const Ints& status, int threads) {
  if (kv.empty()) return;
  AttendCall call;
  const bool indexed = kv[0].itemsize() == 1;
  call.heads = heads;
  require(query.ndim() == 3 && indices.ndim() == 3 && heads > 0, "query and indices need 3 axes");
  call.group = static_cast<int64_t>(query.shape(1)) / heads;
  call.dim = static_cast<int64_t>(query.shape(2));
  require(call.dim % 16 == 0 && call.dim <= kMaxDim, "the head dimension is not supported");
  call.dtype = indexed ? index_of(kv[0], call.dim) : dtype_of(kv[0]);
  call.slots =
      indexed ? indexes(kv, call.dtype, heads, call.dim) : extents(kv, call.dtype, heads, call.dim);
  call.query = query.data();
  call.attend_len = attend_len.data();
  call.select_len = select_len.data();
  call.budget = budget.data();
  call.indices = indices.data();
  call.capacity = static_cast<int64_t>(indices.shape(2));
  call.sinks = sinks;
  call.recent = recent;
  if (self_key && self_value) {
    call.self_key = self_key->data();
    call.self_value = self_value->data();
  }
  require(!log_rest || call.group <= kQuerySet, "log_rest needs at most 16 queries a KV head");
  if (log_rest) call.log_rest = log_rest->data();
  if (elsewhere) call.elsewhere = elsewhere->data();
  call.scale = scale;
  if (output) call.output = output->data();
  call.status = status.data();
  call.threads = threads;
  WithoutGil nogil;
  attend_select(call);
}

void py_index_rows(const std::vector<RowsIn>& kv, const std::vector<RowsIn>& index,
                   const IntsIn& start, const IntsIn& counts, int threads) {
  if (kv.empty()) return;
  IndexCall call;
  require(kv[0].ndim() == 4 && kv.size() == index.size(), "kv needs 4 axes and an index a slot");
  call.dtype = dtype_of(kv[0]);
  call.heads = static_cast<int64_t>(kv[0].shape(0));
  call.dim = static_cast<int64_t>(kv[0].shape(3));
  require(call.dim % 16 == 0 && call.dim <= kMaxDim, "the head dimension is not supported");
  call.slots = extents(kv, call.dtype, call.heads, call.dim);
  call.kind = index_of(index[0], call.dim);
  call.index = indexes(index, call.kind, call.heads, call.dim);
  call.start = start.data();
  call.counts = counts.data();
  call.threads = threads;
  WithoutGil nogil;
  index_rows(call);
}

// Refuses a row that lies outside its extent.
void check_rows(const RowLists& lists, const char* name) {
  const BadIndex bad = find_bad_index(lists);
  if (!bad.found) return;
  const int64_t head = bad.slot * lists.heads + bad.head;
  const int32_t index = lists.indices[head * lists.capacity + bad.position];
  const std::string slot = std::to_string(bad.slot);
  throw std::invalid_argument(name + ("[" + slot) + ", " + std::to_string(bad.head) + ", " +
                              std::to_string(bad.position) + "] is " + std::to_string(index) +
                              ", but kv[" + slot + "] has rows 0 to " +
                              std::to_string(lists.slots[static_cast<size_t>(bad.slot)].rows - 1));
}

void py_gather(const std::vector<RowsIn>& kv, const IntsIn& indices, const IntsIn& counts,
               const Rows& keys, const Rows& values, int64_t row_offset, int threads) {
  if (kv.empty()) return;
  GatherCall call;
  require(keys.ndim() == 4 && indices.ndim() == 3, "out_k needs 4 axes and indices 3");
  call.dtype = dtype_of(keys);
  call.heads = static_cast<int64_t>(keys.shape(2));
  call.dim = static_cast<int64_t>(keys.shape(3));
  call.slots = extents(kv, call.dtype, call.heads, call.dim);
  call.indices = indices.data();
  call.capacity = static_cast<int64_t>(indices.shape(2));
  call.counts = counts.data();
  call.keys = static_cast<char*>(keys.data());
  call.values = static_cast<char*>(values.data());
  call.rows = static_cast<int64_t>(keys.shape(1));
  call.row_offset = row_offset;
  call.threads = threads;
  WithoutGil nogil;
  check_rows({call.slots, call.heads, call.indices, call.capacity, call.counts}, "indices");
  gather(call);
}

void py_rerank(const FloatsIn& query, const std::vector<RowsIn>& kv, const IntsIn& candidates,
               const IntsIn& counts, const IntsIn& budget, const Ints& indices, int64_t sinks,
               int64_t recent, const std::optional<FloatsIn>& elsewhere, float scale,
               const Ints& status, int threads) {
  if (kv.empty()) return;
  RerankCall call;
  require(query.ndim() == 3 && candidates.ndim() == 3 && indices.ndim() == 3 && kv[0].ndim() == 4,
          "query, candidates and indices need 3 axes and kv 4");
  call.dtype = dtype_of(kv[0]);
  call.heads = static_cast<int64_t>(kv[0].shape(0));
  require(call.heads > 0, "kv needs a head");
  call.group = static_cast<int64_t>(query.shape(1)) / call.heads;
  call.dim = static_cast<int64_t>(query.shape(2));
  require(call.dim % 16 == 0 && call.dim <= kMaxDim, "the head dimension is not supported");
  call.slots = extents(kv, call.dtype, call.heads, call.dim);
  call.query = query.data();
  call.candidates = candidates.data();
  call.candidate_capacity = static_cast<int64_t>(candidates.shape(2));
  call.counts = counts.data();
  call.budget = budget.data();
  call.indices = indices.data();
  call.capacity = static_cast<int64_t>(indices.shape(2));
  call.sinks = sinks;
  call.recent = recent;
  call.elsewhere = elsewhere ? elsewhere->data() : nullptr;
  call.scale = scale;
  call.status = status.data();
  call.threads = threads;
  WithoutGil nogil;
  check_rows({call.slots, call.heads, call.candidates, call.candidate_capacity, call.counts},
             "candidates");
  rerank(call);
}

void py_attend_rows(const FloatsIn& query, const std::vector<RowsIn>& kv, const IntsIn& indices,
                    const IntsIn& counts, const IntsIn& tail_begin, const IntsIn& tail_end,
                    const std::optional<FloatsIn>& self_key,
                    const std::optional<FloatsIn>& self_value, float scale, const Floats& output,
                    const Ints& status, int threads) {
  if (kv.empty()) return;
  AttendRowsCall call;
  require(query.ndim() == 3 && indices.ndim() == 3 && kv[0].ndim() == 4,
          "query and indices need 3 axes and kv 4");
  call.dtype = dtype_of(kv[0]);
  call.heads = static_cast<int64_t>(kv[0].shape(0));
  require(call.heads > 0, "kv needs a head");
  call.group = static_cast<int64_t>(query.shape(1)) / call.heads;
  call.dim = static_cast<int64_t>(query.shape(2));
  require(call.dim % 16 == 0 && call.dim <= kMaxDim, "the head dimension is not supported");
  call.slots = extents(kv, call.dtype, call.heads, call.dim);
  call.query = query.data();
  call.indices = indices.data();
  call.capacity = static_cast<int64_t>(indices.shape(2));
  call.counts = counts.data();
  call.tail_begin = tail_begin.data();
  call.tail_end = tail_end.data();
  call.self_key = self_key && self_value ? self_key->data() : nullptr;
  call.self_value = self_key && self_value ? self_value->data() : nullptr;
  call.scale = scale;
  call.output = output.data();
  call.status = status.data();
  call.threads = threads;
  WithoutGil nogil;
  check_rows({call.slots, call.heads, call.indices, call.capacity, call.counts}, "indices");
  attend_rows(call);
}

int64_t py_gather_changes(const std::vector<RowsIn>& kv, const IntsIn& indices,
                          const IntsIn& counts, const IntsIn& previous,
                          const IntsIn& previous_counts, const Ints& source, const Rows& keys,
                          const Rows& values, int threads) {
  if (kv.empty()) return 0;
  ChangesCall call;
  require(indices.ndim() == 3 && previous.ndim() == 3 && keys.ndim() == 2 && kv[0].ndim() == 4,
          "indices and previous need 3 axes, out_k 2 and kv 4");
  call.dtype = dtype_of(kv[0]);
  call.heads = static_cast<int64_t>(kv[0].shape(0));
  call.dim = static_cast<int64_t>(keys.shape(1));
  call.slots = extents(kv, call.dtype, call.heads, call.dim);
  call.indices = indices.data();
  call.capacity = static_cast<int64_t>(indices.shape(2));
  call.counts = counts.data();
  call.previous = previous.data();
  call.previous_capacity = static_cast<int64_t>(previous.shape(2));
  call.previous_counts = previous_counts.data();
  call.source = source.data();
  call.keys = static_cast<char*>(keys.data());
  call.values = static_cast<char*>(values.data());
  call.rows = static_cast<int64_t>(keys.shape(0));
  call.threads = threads;
  WithoutGil nogil;
  check_rows({call.slots, call.heads, call.indices, call.capacity, call.counts}, "indices");
  return gather_changes(call);
}

void py_top_k(const FloatsIn& values, const Ints& indices) {
  require(values.ndim() == 1 && indices.ndim() == 1 && indices.size() <= values.size(),
          "values and indices need 1 axis, and no more indices than values");
  WithoutGil nogil;
  top_k(values.data(), static_cast<int64_t>(values.size()), static_cast<int64_t>(indices.size()),
        indices.data());
}

void py_store(const std::vector<Rows>& kv, const IntsIn& start, const IntsIn& counts,
              const RowsIn& keys, const RowsIn& values, int threads) {
  if (kv.empty()) return;
  StoreCall call;
  require(keys.ndim() == 4, "k needs 4 axes");
  call.dtype = dtype_of(keys);
  call.heads = static_cast<int64_t>(keys.shape(2));
  call.dim = static_cast<int64_t>(keys.shape(3));
  call.slots = extents(kv, call.dtype, call.heads, call.dim);
  call.start = start.data();
  call.counts = counts.data();
  call.keys = static_cast<const char*>(static_cast<const void*>(keys.data()));
  call.values = static_cast<const char*>(static_cast<const void*>(values.data()));
  call.rows = static_cast<int64_t>(keys.shape(1));
  call.threads = threads;
  WithoutGil nogil;
  store(call);
}

// The array owns the mapping: it lives as long as the last view of it.
std::tuple<nb::object, bool, std::string> py_arena(size_t bytes, bool huge_pages, int threads) {
  std::unique_ptr<Arena> arena;
  {
    WithoutGil nogil;
    arena = std::make_unique<Arena>(bytes, huge_pages, threads);
  }
  char* data = arena->data();
  const bool huge = arena->huge_pages();
  const std::string notice = arena->notice();
  nb::capsule owner(arena.get(), [](void* p) noexcept {
    WithoutGil nogil;
    delete static_cast<Arena*>(p);
  });
  arena.release();
  nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> array(data, {bytes}, owner);
  return {nb::cast(array), huge, notice};
}

}  // namespace
}  // namespace herald

NB_MODULE(_native, m) {
  using namespace herald;
  bind_prefetch(m);
  bind_roof(m);
  m.def("attend", &py_attend, "query"_a.noconvert(), "kv"_a, "heads"_a, "attend_len"_a.noconvert(),
        "select_len"_a.noconvert(), "budget"_a.noconvert(), "indices"_a.noconvert(), "sinks"_a,
        "recent"_a, "self_key"_a.none().noconvert(), "self_value"_a.none().noconvert(),
        "elsewhere"_a.none().noconvert(), "log_rest"_a.none().noconvert(), "scale"_a,
        "output"_a.none().noconvert(), "status"_a.noconvert(), "threads"_a);
  m.def("index_rows", &py_index_rows, "kv"_a, "index"_a, "start"_a.noconvert(),
        "counts"_a.noconvert(), "threads"_a);
  m.def("rerank", &py_rerank, "query"_a.noconvert(), "kv"_a, "candidates"_a.noconvert(),
        "counts"_a.noconvert(), "budget"_a.noconvert(), "indices"_a.noconvert(), "sinks"_a,
        "recent"_a, "elsewhere"_a.none().noconvert(), "scale"_a, "status"_a.noconvert(),
        "threads"_a);
  m.def("top_k", &py_top_k, "values"_a.noconvert(), "indices"_a.noconvert());
  m.def("gather_changes", &py_gather_changes, "kv"_a, "indices"_a.noconvert(),
        "counts"_a.noconvert(), "previous"_a.noconvert(), "previous_counts"_a.noconvert(),
        "source"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(), "threads"_a);
  m.def("gather", &py_gather, "kv"_a, "indices"_a.noconvert(), "counts"_a.noconvert(),
        "keys"_a.noconvert(), "values"_a.noconvert(), "row_offset"_a, "threads"_a);
  m.def("store", &py_store, "kv"_a, "start"_a.noconvert(), "counts"_a.noconvert(),
        "keys"_a.noconvert(), "values"_a.noconvert(), "threads"_a);
  m.def("attend_rows", &py_attend_rows, "query"_a.noconvert(), "kv"_a, "indices"_a.noconvert(),
        "counts"_a.noconvert(), "tail_begin"_a.noconvert(), "tail_end"_a.noconvert(),
        "self_key"_a.none().noconvert(), "self_value"_a.none().noconvert(), "scale"_a,
        "output"_a.noconvert(), "status"_a.noconvert(), "threads"_a);
  m.def("set_background", &set_background, "on"_a);
  m.def("arena", &py_arena, "nbytes"_a, "huge_pages"_a, "threads"_a);
  m.def(
      "read_bandwidth",
      [](const BytesIn& data, int threads, int repeats, int64_t streams, int64_t ahead) {
        WithoutGil nogil;
        return read_bandwidth(reinterpret_cast<const char*>(data.data()), data.size(), threads,
                              repeats, {streams, ahead});
      },
      "data"_a.noconvert(), "threads"_a, "repeats"_a, "streams"_a, "ahead"_a);
  m.def(
      "copy_bandwidth",
      [](const BytesIn& from, const Bytes& to, int threads, int repeats) {
        require(from.size() == to.size(), "src and dst must have one size");
        WithoutGil nogil;
        return copy_bandwidth(reinterpret_cast<const char*>(from.data()),
                              reinterpret_cast<char*>(to.data()), from.size(), threads, repeats);
      },
      "source"_a.noconvert(), "target"_a.noconvert(), "threads"_a, "repeats"_a);
  m.def("isa_names", &isa_names);
  m.def("available_isas", &available_isas);
  m.def("active_isa", [] { return active_table().name; });
  m.def("choose_isa", &choose_isa, "name"_a);
  m.def("cpu_name", [] {
    const CpuState cpu = read_cpu_state();
    return std::pair<std::string, std::string>(cpu.vendor, cpu.model);
  });
}
