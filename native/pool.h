// One pool of threads for all operators. An operator is one parallel region: every thread of the team runs
// the same function, in stages parted by barriers; work inside a stage is claimed in small ranges, so that
// a core that is busy elsewhere delays nobody. Which thread computes what never changes a result.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace longspan {

// Waits for a counter: spins for a moment, then sleeps in the kernel.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void open() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) value_.notify_all();
  }
  void wait_past(uint32_t seen, int spins);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
};

class Pool;

// What a thread sees of its region.
class Team {
 public:
  const int rank;
  const int size;

  // Calls work(begin, end) on disjoint ranges that cover [0, count), at most `grain` long. No barrier after
  // it: several loops may follow each other, at most kLoops between two barriers.
  template <class Work>
  void claim(int64_t count, int64_t grain, Work&& work) {
    if (size == 1) {
      for (int64_t begin = 0; begin < count; begin += grain) work(begin, std::min(begin + grain, count));
      return;
    }
    std::atomic<int64_t>& next = counter();
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      work(begin, std::min(begin + grain, count));
    }
  }

  // Returns when all threads of the team are here; what they wrote before is then visible.
  void barrier();

  static constexpr int kLoops = 16;

 private:
  friend class Pool;
  Team(int rank, int size, Pool* pool) : rank(rank), size(size), pool_(pool) {}
  std::atomic<int64_t>& counter();

  Pool* pool_;  // null: the team is one thread
  int loop_ = 0;
};

class Pool {
 public:
  // `threads` includes the caller. Threads run where the process may, or thread i > 0 on cpus[i % n] alone; the
  // caller stays where it is.
  Pool(int threads, std::vector<int> cpus);
  ~Pool();

  int size() const { return size_; }

  // Runs body(team) on the caller alone: for work that is not worth waking anybody.
  static void alone(const std::function<void(Team&)>& body);

  // Runs body(team) on every thread, the caller included. Regions of several callers run one after another.
  void run(const std::function<void(Team&)>& body);

 private:
  friend class Team;
  void work(int rank);

  const int size_;
  const int spins_;
  const std::vector<int> cpus_;
  std::mutex region_;
  const std::function<void(Team&)>* body_ = nullptr;
  bool stop_ = false;
  Gate started_;
  Gate barrier_;
  std::atomic<int> arrived_{0};
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  Counter counters_[Team::kLoops];
  std::vector<std::thread> threads_;
};

// The pool of the process: as many threads as the process has cores, until `set_threads` says otherwise. An
// operator keeps hold of the one it began with: another may take its place meanwhile.
std::shared_ptr<Pool> pool();
void set_threads(int threads, std::vector<int> cpus);

}  // namespace longspan
