#include "threads.hpp"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

namespace firstlight {
namespace {

// About 25 microseconds of waiting on a 2 to 3 GHz time stamp counter: longer than the gap
// between two operations of a step, far shorter than a scheduler's time slice.
constexpr std::uint64_t kSpinTicks = 65000;
constexpr int kMaxThreads = 255;

void futex_wait(std::atomic<std::uint32_t>* word, std::uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, kMaxThreads, nullptr, nullptr, 0);
}

// Waits until the word differs from `seen` and returns its new value.
std::uint32_t wait_for_change(std::atomic<std::uint32_t>* word, std::atomic<std::uint32_t>* sleepers,
                              std::uint32_t seen) {
  const std::uint64_t start = __rdtsc();
  while (true) {
    const std::uint32_t now = word->load(std::memory_order_acquire);
    if (now != seen) return now;
    if (__rdtsc() - start > kSpinTicks) break;
    _mm_pause();
  }
  sleepers->fetch_add(1);
  std::uint32_t now;
  while ((now = word->load()) == seen) futex_wait(word, seen);
  sleepers->fetch_sub(1);
  return now;
}

struct Pool {
  // Number of the run in the upper 24 bits, threads of that run in the lower 8: one word, so that
  // a late worker can't pair one run's number with another's size.
  alignas(64) std::atomic<std::uint32_t> generation{0};
  alignas(64) std::atomic<std::uint32_t> sleepers{0};
  alignas(64) std::atomic<std::uint32_t> finished{0};  // counts runs ended by their last worker
  alignas(64) std::atomic<std::uint32_t> finish_sleepers{0};
  alignas(64) std::atomic<int> remaining{0};
  alignas(64) std::atomic<std::uint32_t> barrier_arrived{0};
  std::atomic<std::uint32_t> barrier_passed{0};
  alignas(64) std::atomic<bool> busy{false};
  int workers = 0;
  ThreadBody body = nullptr;
  void* context = nullptr;
};

std::atomic<Pool*> current_pool{nullptr};

void work(Pool* pool, int thread, std::uint32_t seen) {
  while (true) {
    seen = wait_for_change(&pool->generation, &pool->sleepers, seen);
    const int active = static_cast<int>(seen & 255);
    if (thread >= active) continue;
    pool->body(pool->context, thread, active);
    if (pool->remaining.fetch_sub(1) == 1) {
      pool->finished.fetch_add(1);
      if (pool->finish_sleepers.load()) futex_wake_all(&pool->finished);
    }
  }
}

// The parent's workers do not exist in a forked child: it gets a pool of its own, and the old one
// is left alone because another thread of the parent may have held it.
void forget_pool() { current_pool.store(nullptr); }

Pool* acquire_pool() {
  Pool* pool = current_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    (void)registered;
    Pool* fresh = new Pool;
    if (current_pool.compare_exchange_strong(pool, fresh)) {
      pool = fresh;
    } else {
      delete fresh;
    }
  }
  bool expected = false;
  return pool->busy.compare_exchange_strong(expected, true) ? pool : nullptr;
}

void start_workers(Pool* pool, int wanted) {
  while (pool->workers < wanted) {
    const std::uint32_t seen = pool->generation.load();
    std::thread(work, pool, pool->workers + 1, seen).detach();
    ++pool->workers;
  }
}

}  // namespace

void run_threads(int threads, ThreadBody body, void* context) {
  if (threads > kMaxThreads) threads = kMaxThreads;
  Pool* pool = threads > 1 ? acquire_pool() : nullptr;
  if (pool == nullptr) {
    body(context, 0, 1);
    return;
  }
  start_workers(pool, threads - 1);
  pool->body = body;
  pool->context = context;
  pool->remaining.store(threads - 1);
  const std::uint32_t finished = pool->finished.load();
  const std::uint32_t run = (pool->generation.load() >> 8) + 1;
  pool->generation.store(run << 8 | static_cast<std::uint32_t>(threads));
  if (pool->sleepers.load()) futex_wake_all(&pool->generation);
  body(context, 0, threads);
  wait_for_change(&pool->finished, &pool->finish_sleepers, finished);
  pool->busy.store(false, std::memory_order_release);
}

void thread_barrier(int threads) {
  if (threads == 1) return;
  Pool* pool = current_pool.load(std::memory_order_acquire);
  const std::uint32_t passed = pool->barrier_passed.load(std::memory_order_acquire);
  if (pool->barrier_arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(threads)) {
    pool->barrier_arrived.store(0);
    pool->barrier_passed.fetch_add(1);
    return;
  }
  std::uint64_t start = __rdtsc();
  while (pool->barrier_passed.load(std::memory_order_acquire) == passed) {
    _mm_pause();
    if (__rdtsc() - start > kSpinTicks) {
      sched_yield();
      start = __rdtsc() - kSpinTicks / 2;
    }
  }
}

void* thread_scratch(int slot, std::int64_t bytes) {
  struct Blocks {
    void* data[4] = {};
    std::int64_t size[4] = {};
    ~Blocks() {
      for (void* block : data) std::free(block);
    }
  };
  static thread_local Blocks blocks;
  if (blocks.size[slot] < bytes) {
    std::free(blocks.data[slot]);
    blocks.data[slot] = nullptr;
    blocks.size[slot] = 0;
    const std::int64_t rounded = (bytes + 4095) / 4096 * 4096;
    blocks.data[slot] = std::aligned_alloc(4096, rounded);
    if (blocks.data[slot] == nullptr) throw std::bad_alloc();
    blocks.size[slot] = rounded;
  }
  return blocks.data[slot];
}

}  // namespace firstlight
