// The fused kernel on every instruction set against a naive double-precision loop.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "attend_rows.h"
#include "cases.h"
#include "check.h"
#include "cpu_features.h"

using cases::Case;
using herald::DType;

namespace {

struct Expected {
  std::vector<double> output, importance;  // [heads * group][dim], [heads][rows]
};

Expected naive(const Case& c, bool with_self) {
  const int64_t rows = c.attend_len, all = rows + with_self;
  Expected e;
  e.output.assign(c.query.size(), 0);
  e.importance.assign(static_cast<size_t>(c.heads * rows), 0);
  for (int64_t hg = 0; hg < c.heads * c.group; ++hg) {
    const int64_t h = hg / c.group;
    const auto key = [&](int64_t r) { return r < rows ? c.row(h, r) : c.self.data() + h * c.dim; };
    const auto value = [&](int64_t r) { return r < rows ? key(r) + c.plane() : key(r); };
    std::vector<double> p(static_cast<size_t>(all));
    double top = -INFINITY, total = 0;
    for (int64_t r = 0; r < all; ++r) {
      double dot = 0;
      for (int64_t d = 0; d < c.dim; ++d)
        dot += static_cast<double>(c.query[hg * c.dim + d]) * key(r)[d];
      top = std::max(top, p[r] = 0.25 * dot);
    }
    for (double& x : p) total += x = std::exp(x - top);
    for (int64_t r = 0; r < all; ++r) {
      if (r < rows) e.importance[h * rows + r] += p[r] / total;
      for (int64_t d = 0; d < c.dim; ++d) e.output[hg * c.dim + d] += p[r] / total * value(r)[d];
    }
  }
  return e;
}

// The selection must be ascending, start with the sinks, end with -1 and be a top-k up to rounding.
void check_selection(const Case& c, const Expected& e, const char* what) {
  for (int64_t h = 0; h < c.heads; ++h) {
    const int32_t* index = c.indices.data() + h * (c.budget + 1);
    std::vector<bool> chosen(static_cast<size_t>(c.select_len) + 1);
    for (int32_t j = 0; j < c.budget; ++j) {
      CHECK(index[j] >= 0 && index[j] < c.select_len && (j == 0 || index[j] > index[j - 1]),
            "%s head %d entry %d is %d", what, int(h), j, index[j]);
      if (index[j] < 0 || index[j] >= c.select_len) return;
      chosen[static_cast<size_t>(index[j])] = true;
    }
    CHECK(index[c.budget] == -1, "%s", what);
    for (int32_t r = 0; r < std::min(2, c.budget); ++r) CHECK(chosen[r], "%s sink %d", what, r);
    double least = INFINITY, most = 0;
    for (int32_t r = 2; r < c.select_len; ++r) {
      const double mass = e.importance[h * c.attend_len + r];
      if (chosen[r])
        least = std::min(least, mass);
      else
        most = std::max(most, mass);
    }
    CHECK(c.budget <= 2 || least >= most * (1 - 1e-4), "%s head %d: %g < %g", what, int(h), least,
          most);
  }
}

void check_case(Case c, int threads, bool with_self, bool with_output, const char* isa) {
  char what[160];
  std::snprintf(what, sizeof what, "%s %s rows %d dim %d group %d threads %d self %d out %d", isa,
                c.dtype == DType::kBFloat16 ? "bf16" : "fp32", c.attend_len, int(c.dim),
                int(c.group), threads, with_self, with_output);
  const Expected e = naive(c, with_self);
  herald::attend_select(c.call(threads, with_self, with_output));
  CHECK(c.status == 0, "%s", what);
  double worst = 0;
  for (size_t i = 0; i < c.output.size(); ++i)
    worst = std::max(worst, std::fabs(with_output ? c.output[i] - e.output[i] : c.output[i] + 7.0));
  CHECK(worst < 1e-5, "%s: output off by %g", what, worst);
  check_selection(c, e, what);
}

void lengths(const std::string& isa) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (int64_t rows : {0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 200})
      for (int64_t dim : {16, 48, 128})
        for (int64_t group : {1, 3, 4})
          check_case(Case(dtype, 2, group, dim, rows, 1), 1 + rows % 2, rows % 3 == 0,
                     rows % 4 != 1, isa.c_str());
    for (int64_t rows : {4095, 4096, 4097, 4129, 8193})
      check_case(Case(dtype, 1, 2, 16, rows, 2), 3, true, true, isa.c_str());
  }
}

void thread_counts(const std::string& isa) {
  // Bits, not tolerances; 9000 rows of one head are split by chunk, three heads by head.
  for (int64_t heads : {1, 3}) {
    Case one(DType::kBFloat16, heads, 4, 64, 9000, 3);
    herald::attend_select(one.call(1, true, true));
    for (int threads = 2; threads <= 4; ++threads) {
      Case many(DType::kBFloat16, heads, 4, 64, 9000, 3);
      herald::attend_select(many.call(threads, true, true));
      CHECK(one.output == many.output && one.indices == many.indices, "%s %d threads", isa.c_str(),
            threads);
    }
  }
}

void ties(const std::string& isa) {
  // Equal keys everywhere: whatever tile or tail a row stands in, ties go to the lower row.
  Case c(DType::kBFloat16, 1, 3, 48, 5003, 4);
  for (int64_t r = 1; r < c.rows(); ++r)
    std::copy_n(c.row(0, 0), c.dim, c.numbers.data() + r * c.dim);
  // A few better rows late in the sequence move the running maximum between equal ones.
  for (int64_t r : {4500, 4600, 4999})
    for (int64_t d = 0; d < c.dim; ++d) c.numbers[r * c.dim + d] = c.query[d];
  c.budget = 100;
  c.pack();
  herald::attend_select(c.call(2, false, true));
  for (int32_t j = 0; j < 97; ++j) CHECK(c.indices[j] == j, "%s: %d", isa.c_str(), c.indices[j]);
  CHECK(c.indices[97] == 4500 && c.indices[98] == 4600 && c.indices[99] == 4999, "%s", isa.c_str());
}

void not_finite(const std::string& isa) {
  for (float poison : {INFINITY, -INFINITY, NAN}) {
    for (int64_t where : {0, 1}) {  // in a key, in a value
      Case c(DType::kFloat32, 2, 2, 32, 300, 5);
      c.numbers[(123 + where * c.rows()) * c.dim + 3] = poison;
      c.pack();
      herald::attend_select(c.call(2, false, true));
      CHECK(c.status == 1, "%s", isa.c_str());
      CHECK(std::all_of(c.output.begin(), c.output.end(), [](float x) { return x == 0; }), "%s",
            isa.c_str());
      for (int64_t h = 0; h < 2; ++h) {
        const int32_t* index = c.indices.data() + h * (c.budget + 1);
        CHECK(index[0] == 0 && index[1] == 1 && index[2] == c.select_len - (c.budget - 2) &&
                  index[c.budget - 1] == c.select_len - 1 && index[c.budget] == -1,
              "%s", isa.c_str());
      }
    }
  }
}

void elsewhere(const std::string& isa) {
  // A key that is told by its score alone chooses as one that stands beside the rows.
  for (int64_t rows : {1, 31, 64, 200, 4097})
    for (int64_t group : {1, 3, 16}) {
      Case beside(DType::kFloat32, 2, group, 32, rows, 6),
          told(DType::kFloat32, 2, group, 32, rows, 6);
      herald::attend_select(beside.call(2, true, false));
      std::vector<float> scores(static_cast<size_t>(told.heads * group));
      for (int64_t hg = 0; hg < told.heads * group; ++hg)
        for (int64_t d = 0; d < told.dim; ++d)
          scores[hg] +=
              0.25f * told.query[hg * told.dim + d] * told.self[hg / group * told.dim + d];
      herald::AttendCall call = told.call(2, false, false);
      call.elsewhere = scores.data();
      herald::attend_select(call);
      CHECK(told.status == 0, "%s", isa.c_str());
      for (int64_t h = 0; h < told.heads; ++h) {
        const auto a = told.indices.begin() + h * (told.budget + 1);
        const auto b = beside.indices.begin() + h * (told.budget + 1);
        std::vector<int32_t> odd;
        std::set_symmetric_difference(a, a + told.budget, b, b + told.budget,
                                      std::back_inserter(odd));
        // Rounding may swap two rows of equal mass at the border.
        CHECK(odd.size() <= 2, "%s rows %d", isa.c_str(), int(rows));
      }
      scores[0] = -INFINITY;
      herald::attend_select(call);
      CHECK(told.status == 0, "%s", isa.c_str());
      for (float bad : {NAN, INFINITY}) {
        scores[0] = bad;
        herald::attend_select(call);
        CHECK(told.status == 1, "%s", isa.c_str());
      }
    }
}

void chosen_rows(const std::string& isa) {
  // All rows that can be chosen, and those behind them: attention over everything.
  for (DType dtype : {DType::kBFloat16, DType::kFloat32})
    for (int64_t rows : {0, 1, 2, 17, 33, 200, 4097})
      for (int64_t group : {1, 4})
        for (bool with_self : {false, true}) {
          Case c(dtype, 2, group, 48, rows, 7);
          std::vector<int32_t> all(static_cast<size_t>(c.heads * c.select_len));
          for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i) % c.select_len;
          herald::AttendRowsCall call{};
          call.dtype = c.dtype;
          call.slots = {{c.storage.data(), c.rows()}};
          call.heads = c.heads;
          call.group = c.group;
          call.dim = c.dim;
          call.query = c.query.data();
          call.indices = all.data();
          call.capacity = c.select_len;
          call.counts = &c.select_len;
          call.tail_begin = &c.select_len;
          call.tail_end = &c.attend_len;
          call.self_key = call.self_value = with_self ? c.self.data() : nullptr;
          call.scale = 0.25f;
          call.output = c.output.data();
          call.status = &c.status;
          call.threads = 2;
          herald::attend_rows(call);
          const Expected e = naive(c, with_self);
          double worst = 0;
          for (size_t i = 0; i < c.output.size(); ++i)
            worst = std::max(worst, std::fabs(c.output[i] - e.output[i]));
          CHECK(c.status == 0 && worst < 1e-5, "%s rows %d off by %g", isa.c_str(), int(rows),
                worst);
        }
}

}  // namespace

int main() {
  for (const std::string& isa : check::isas()) {
    herald::choose_isa(isa);
    lengths(isa);
    thread_counts(isa);
    ties(isa);
    not_finite(isa);
    elsewhere(isa);
    chosen_rows(isa);
  }
  return check::finish();
}
