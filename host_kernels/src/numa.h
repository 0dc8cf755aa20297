// Which CPUs are near which memory.
#pragma once

#include <string>
#include <vector>

namespace herald {

// CPUs of one NUMA node that this process may run on, ascending.
using NodeCpus = std::vector<int>;

// Parses a list of the kernel's kind, "0-3,8,10-11"; what does not parse is left out.
NodeCpus parse_cpu_list(const std::string& text);

// The nodes with CPUs among `allowed`, in order of their number; a single node without CPUs when
// the system does not say. `root` is where sys is mounted.
std::vector<NodeCpus> read_nodes(const std::string& root, const NodeCpus& allowed);

// The CPUs that this thread may run on.
NodeCpus allowed_cpus();

// The nodes of this machine, read once.
const std::vector<NodeCpus>& nodes();

// For tests: another root for the first call of nodes().
void set_nodes_root(const std::string& root);

// Keeps the calling thread on these CPUs; a refusal by the system changes nothing.
void bind_to(const NodeCpus& cpus);

}  // namespace herald
