#include "numa.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

namespace herald {
namespace {

// More than any machine has; bounds what a damaged list can make us build.
constexpr long kMaxCpus = 8192;
// Node numbers may have gaps: memory without CPUs, or nodes switched off.
constexpr int kMaxNodes = 64;

std::string& nodes_root() {
  static std::string root;
  return root;
}

}  // namespace

NodeCpus parse_cpu_list(const std::string& text) {
  NodeCpus cpus;
  const char* at = text.c_str();
  while (*at) {
    char* end;
    const long first = std::strtol(at, &end, 10);
    if (end == at) break;
    long last = first;
    if (*end == '-') {
      at = end + 1;
      last = std::strtol(at, &end, 10);
      if (end == at) break;
    }
    for (long cpu = std::max(first, 0L); cpu <= last && cpu < kMaxCpus; ++cpu)
      cpus.push_back(static_cast<int>(cpu));
    at = *end == ',' ? end + 1 : "";
  }
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

std::vector<NodeCpus> read_nodes(const std::string& root, const NodeCpus& allowed) {
  std::vector<NodeCpus> found;
  for (int node = 0; node < kMaxNodes; ++node) {
    std::ifstream file(root + "/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
    std::string line;
    if (!std::getline(file, line)) continue;
    NodeCpus cpus;
    for (int cpu : parse_cpu_list(line))
      if (std::binary_search(allowed.begin(), allowed.end(), cpu)) cpus.push_back(cpu);
    if (!cpus.empty()) found.push_back(cpus);
  }
  if (found.empty()) found.emplace_back();
  return found;
}

NodeCpus allowed_cpus() {
  NodeCpus cpus;
  cpu_set_t* set = CPU_ALLOC(kMaxCpus);
  const size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
  if (set && sched_getaffinity(0, bytes, set) == 0)
    for (int cpu = 0; cpu < kMaxCpus; ++cpu)
      if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, set)) cpus.push_back(cpu);
  CPU_FREE(set);
  return cpus;
}

const std::vector<NodeCpus>& nodes() {
  static const std::vector<NodeCpus> read = read_nodes(nodes_root(), allowed_cpus());
  return read;
}

void set_nodes_root(const std::string& root) { nodes_root() = root; }

void bind_to(const NodeCpus& cpus) {
  if (cpus.empty()) return;
  cpu_set_t* set = CPU_ALLOC(kMaxCpus);
  if (!set) return;
  const size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
  CPU_ZERO_S(bytes, set);
  for (int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
  (void)sched_setaffinity(0, bytes, set);
  CPU_FREE(set);
}

}  // namespace herald
