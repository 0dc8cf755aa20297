// The pool: every participant runs once, callers may compete, a child process gets its own.
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "thread_pool.h"

namespace {

void everyone_once(int threads, int calls) {
  for (int call = 0; call < calls; ++call) {
    herald::PoolLease lease(threads);
    std::vector<int> ran(static_cast<size_t>(lease.threads()));
    lease.run([&](int index) { ++ran[static_cast<size_t>(index)]; });
    for (int count : ran) CHECK(count == 1, "%d threads", threads);
  }
}

void competing_callers() {
  int inside = 0;  // guarded by the lease alone: a race here is a broken lease
  std::vector<std::thread> callers;
  std::atomic<int> total{0};
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&, i] {
      for (int call = 0; call < 50; ++call) {
        herald::PoolLease lease(1 + i);
        ++inside;
        std::memset(lease.call_scratch(1000), i, 1000);
        lease.run([&](int) { total.fetch_add(1); });
      }
    });
  for (auto& caller : callers) caller.join();
  CHECK(inside == 200 && total == 50 * (1 + 2 + 3 + 4), "%d %d", inside, total.load());
}

void scratch_grows() {
  herald::PoolLease lease(3);
  void* small = lease.call_scratch(100);
  CHECK(reinterpret_cast<uintptr_t>(small) % 64 == 0);
  CHECK(lease.call_scratch(50) == small);
  std::memset(lease.call_scratch(100000), 1, 100000);
  for (size_t bytes : {size_t{100}, size_t{100000}, size_t{50}}) {
    lease.reserve_each(bytes);
    lease.run([&](int index) { std::memset(lease.scratch_of(index), index, bytes); });
    for (int i = 0; i < lease.threads(); ++i)
      CHECK(static_cast<char*>(lease.scratch_of(i))[bytes - 1] == i);
  }
}

// Pauses around the moment at which workers stop spinning and go to sleep.
void parked_workers_resume() {
  for (int i = 0; i < 1000; ++i) {
    everyone_once(3, 1);
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(i % 50);
    while (std::chrono::steady_clock::now() < end) continue;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  everyone_once(3, 1);
}

// How often each worker has gone to sleep, by the name that the pool gave it.
std::map<std::string, long> sleeps() {
  std::map<std::string, long> counts;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, line;
    std::ifstream(task.path() / "comm") >> name;
    std::ifstream status(task.path() / "status");
    while (std::getline(status, line))
      std::sscanf(line.c_str(), "voluntary_ctxt_switches: %ld", &counts[name]);
  }
  return counts;
}

double process_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void idle_workers_use_no_time() {
  everyone_once(16, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = process_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const double used = process_seconds() - before;
  std::printf("15 idle workers used %.0f us in 200 ms\n", used * 1e6);
  CHECK(used < 0.02, "%g s", used);
}

void only_participants_wake() {
  everyone_once(16, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto before = sleeps();
  for (int i = 0; i < 10; ++i) {
    everyone_once(3, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  int workers = 0, woken = 0;
  for (const auto& [name, count] : sleeps()) {
    if (name.rfind("herald-", 0) != 0) continue;
    ++workers;
    woken += count != before.at(name);
  }
  CHECK(workers >= 15 && woken == 2, "%d of %d", woken, workers);
}

void child_process() {
  const pid_t child = fork();
  if (child == 0) {
    everyone_once(3, 5);
    _exit(check::failures);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0, "child status %d", status);
  everyone_once(3, 5);
}

}  // namespace

int main(int argc, char**) {
  for (int threads = 1; threads <= 5; ++threads) everyone_once(threads, 50);
  competing_callers();
  scratch_grows();
  parked_workers_resume();
  idle_workers_use_no_time();
  only_participants_wake();
  // ThreadSanitizer does not allow a forked child to start threads.
  if (argc == 1) child_process();
  return check::finish();
}
