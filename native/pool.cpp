#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdexcept>
#include <unistd.h>

namespace longspan {
namespace {

// About 50 us: longer than what lies between two operators of a step, shorter than anybody's patience.
constexpr int kSpins = 2000;
// A team larger than the machine must not spin: the one it waits for needs the core.
constexpr int kSpinsOversubscribed = 0;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return int(std::thread::hardware_concurrency());
}

void pin(int cpu) {
  if (cpu >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

void Gate::wait_past(uint32_t seen, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value() != seen) return;
    pause();
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value() == seen) value_.wait(seen, std::memory_order_acquire);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

std::atomic<int64_t>& Team::counter() {
  if (loop_ == kLoops) throw std::logic_error("too many loops between two barriers");
  return pool_->counters_[loop_++].next;
}

void Team::barrier() {
  loop_ = 0;
  if (size == 1) return;
  Pool& pool = *pool_;
  const uint32_t seen = pool.barrier_.value();
  if (pool.arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
    pool.arrived_.store(0, std::memory_order_relaxed);
    for (auto& counter : pool.counters_) counter.next.store(0, std::memory_order_relaxed);
    pool.barrier_.open();
  } else {
    pool.barrier_.wait_past(seen, pool.spins_);
  }
}

Pool::Pool(int threads, std::vector<int> cpus)
    : size_(threads), spins_(threads > cores() ? kSpinsOversubscribed : kSpins), cpus_(std::move(cpus)) {
  for (int rank = 1; rank < size_; ++rank) threads_.emplace_back([this, rank] { work(rank); });
}

Pool::~Pool() {
  {
    std::lock_guard lock(region_);
    stop_ = true;
    started_.open();
  }
  for (auto& thread : threads_) thread.join();
}

void Pool::alone(const std::function<void(Team&)>& body) {
  Team team(0, 1, nullptr);
  body(team);
}

void Pool::run(const std::function<void(Team&)>& body) {
  std::lock_guard lock(region_);
  body_ = &body;
  if (size_ > 1) started_.open();
  Team team(0, size_, this);
  body(team);
  team.barrier();
}

void Pool::work(int rank) {
  if (!cpus_.empty()) pin(cpus_[rank % cpus_.size()]);
  for (uint32_t seen = 0;; ++seen) {
    started_.wait_past(seen, spins_);
    if (stop_) return;
    Team team(rank, size_, this);
    (*body_)(team);
    team.barrier();
  }
}

namespace {

std::mutex instance_lock;
std::shared_ptr<Pool> instance;
pid_t instance_process = 0;

// A fork has the pool but none of its threads, which nobody can join: it is left where it is.
void leave_behind_in_fork() {
  if (instance && instance_process != getpid()) new std::shared_ptr<Pool>(std::move(instance));
}

}  // namespace

std::shared_ptr<Pool> pool() {
  std::lock_guard lock(instance_lock);
  leave_behind_in_fork();
  if (!instance) {
    instance = std::make_shared<Pool>(cores(), std::vector<int>{});
    instance_process = getpid();
  }
  return instance;
}

void set_threads(int threads, std::vector<int> cpus) {
  auto fresh = std::make_shared<Pool>(threads, std::move(cpus));
  std::lock_guard lock(instance_lock);
  leave_behind_in_fork();
  std::swap(instance, fresh);  // the old one ends when the last operator lets go of it
  instance_process = getpid();
}

}  // namespace longspan
