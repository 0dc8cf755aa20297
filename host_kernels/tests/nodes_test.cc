// Memory nodes: what the system says of them, who touches what, and who scans it.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "cases.h"
#include "check.h"
#include "home_queues.h"
#include "numa.h"
#include "thread_pool.h"

namespace {

using herald::NodeCpus;

void lists() {
  const std::vector<std::pair<std::string, NodeCpus>> cases{
      {"0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}},
      {"5", {5}},
      {"", {}},
      {"\n", {}},
      {"nonsense", {}},
      {"3,1,3", {1, 3}},
      {"4-", {}},
      {"7-5", {}},
      {"0-1,x", {0, 1}},
      {"99999999999999999999", {}},
      {"8190-99999999", {8190, 8191}},
  };
  for (const auto& [text, want] : cases)
    CHECK(herald::parse_cpu_list(text) == want, "'%s'", text.c_str());
}

// A system with these nodes, in a folder of its own.
class FakeRoot {
 public:
  explicit FakeRoot(const std::vector<std::pair<int, std::string>>& nodes) {
    char name[] = "/tmp/herald-nodes-XXXXXX";
    path_ = mkdtemp(name);
    for (const auto& [number, cpus] : nodes) {
      const auto folder = path_ / "sys/devices/system/node" / ("node" + std::to_string(number));
      std::filesystem::create_directories(folder);
      std::ofstream(folder / "cpulist") << cpus << '\n';
    }
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

void nodes_of_a_root() {
  const NodeCpus all{0, 1, 2, 3, 4, 5, 6, 7};
  const auto read = [&](const std::vector<std::pair<int, std::string>>& nodes,
                        const NodeCpus& allowed) {
    return herald::read_nodes(FakeRoot(nodes).path(), allowed);
  };
  using Nodes = std::vector<NodeCpus>;
  CHECK(read({}, all) == Nodes{NodeCpus{}});
  CHECK(read({{0, "0-7"}}, all) == Nodes{all});
  CHECK((read({{0, "0-3"}, {1, "4-7"}}, all) == Nodes{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  // A node of memory alone, a gap in the numbers, CPUs that this process may not use.
  CHECK((read({{0, "0-3"}, {1, ""}, {4, "4-7"}}, {2, 5, 6}) == Nodes{{2}, {5, 6}}));
  CHECK((read({{0, "0-3"}, {1, "4-7"}}, {0, 1}) == Nodes{{0, 1}}));
}

void queues() {
  for (int homes : {1, 2, 5})
    for (int tasks : {0, 1, 2, 1000}) {
      herald::HomeQueues q;
      for (int home = 0; home < homes; ++home)
        q.close(home, home == homes - 1 ? tasks : tasks * (home + 1) / (homes + 3));
      std::vector<std::atomic<int>> taken(static_cast<size_t>(tasks));
      std::vector<std::thread> takers;
      for (int home = 0; home < homes; ++home)
        takers.emplace_back([&, home] {
          for (int64_t task; (task = q.take(home)) >= 0;) ++taken[static_cast<size_t>(task)];
        });
      for (auto& taker : takers) taker.join();
      for (const auto& times : taken) CHECK(times == 1, "%d homes %d tasks", homes, tasks);
    }
  herald::HomeQueues own;  // one's own first, and in order
  own.close(0, 2);
  own.close(1, 4);
  for (int64_t want : {2, 3, 0, 1, -1}) CHECK(own.take(1) == want);
}

void participants_keep_to_their_node() {
  const NodeCpus all = herald::allowed_cpus();
  herald::PoolLease lease(5);
  CHECK(lease.homes() == 2);
  std::vector<NodeCpus> cpus(static_cast<size_t>(lease.threads()));
  lease.run([&](int index) { cpus[static_cast<size_t>(index)] = herald::allowed_cpus(); });
  CHECK(cpus[0] == all);  // the caller's thread is not ours to bind
  for (int i = 1; i < lease.threads(); ++i)
    CHECK(lease.home(i) == i % 2 && cpus[static_cast<size_t>(i)] == herald::nodes()[i % 2], "%d",
          i);
}

void owners() {
  const size_t page = size_t{2} << 20;
  {
    const herald::Arena small(5 * page, false, 2), large(70 * page, false, 2);
    for (size_t i = 0; i < 5; ++i) CHECK(herald::owner(small.data() + i * page) == (i >= 3));
    std::set<int> seen;
    for (size_t i = 0; i < 70; ++i) {
      const int by = herald::owner(large.data() + i * page + 12345);
      CHECK(by == static_cast<int>(i / 16 % 2), "page %d by %d", int(i), by);
      seen.insert(by);
    }
    CHECK(seen.size() == 2);
  }
  int local = 0;
  CHECK(herald::owner(&local) == -1);
}

// Two nodes change who scans what, never what is found.
void same_results() {
  for (int64_t heads : {1, 5}) {
    cases::Case one(herald::DType::kBFloat16, heads, 2, 32, 9000, 3);
    herald::attend_select(one.call(1, true, true));
    // The same rows in an arena, whose stripes two participants have touched.
    const size_t bytes = one.storage.size();
    const herald::Arena arena(bytes + (size_t{6} << 20), false, 2);
    for (size_t offset : {size_t{0}, size_t{6} << 20})
      for (int threads : {1, 3}) {
        cases::Case many(one);
        std::fill(many.output.begin(), many.output.end(), -7.0f);
        std::fill(many.indices.begin(), many.indices.end(), -7);
        herald::AttendCall call = many.call(threads, true, true);
        std::memcpy(arena.data() + offset, many.storage.data(), bytes);
        call.slots[0].data = arena.data() + offset;
        herald::attend_select(call);
        CHECK(one.output == many.output && one.indices == many.indices, "%d heads %d threads",
              int(heads), threads);
      }
  }
}

}  // namespace

int main() {
  lists();
  nodes_of_a_root();
  queues();
  // From here on this machine has two nodes, of one CPU each where it has two.
  const NodeCpus all = herald::allowed_cpus();
  const FakeRoot two({{0, std::to_string(all.front())}, {1, std::to_string(all.back())}});
  herald::set_nodes_root(two.path());
  participants_keep_to_their_node();
  owners();
  same_results();
  return check::finish();
}
