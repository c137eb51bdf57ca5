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
  alignas(64) std::atomic<std::uint32_t> generation{0};
  alignas(64) std::atomic<std::uint32_t> sleepers{0};
  alignas(64) std::atomic<int> places{0};  // of the run that workers may still take
  alignas(64) std::atomic<std::uint32_t> done{0};  // workers that ended in this run
  alignas(64) std::atomic<std::uint32_t> done_sleepers{0};
  alignas(64) std::atomic<bool> busy{false};
  int workers = 0;
  // Written before `places` opens, and not again before every worker that took one has ended.
  int threads = 0;
  ThreadBody body = nullptr;
  void* context = nullptr;
};

std::atomic<Pool*> current_pool{nullptr};

// Returns the number of the place taken, from 1; 0 when there is none.
int take_place(Pool* pool) {
  int places = pool->places.load(std::memory_order_acquire);
  while (places > 0 && !pool->places.compare_exchange_weak(places, places - 1)) {
  }
  return places > 0 ? places : 0;
}

void work(Pool* pool, std::uint32_t seen) {
  while (true) {
    seen = wait_for_change(&pool->generation, &pool->sleepers, seen);
    const int place = take_place(pool);
    if (place == 0) continue;
    pool->body(pool->context, place, pool->threads);
    pool->done.fetch_add(1);
    if (pool->done_sleepers.load()) futex_wake_all(&pool->done);
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
    std::thread(work, pool, seen).detach();
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
  pool->threads = threads;
  pool->done.store(0);
  pool->places.store(threads - 1);
  pool->generation.fetch_add(1);
  if (pool->sleepers.load()) futex_wake_all(&pool->generation);
  body(context, 0, threads);
  // Workers that didn't get a core in time are not waited for: the work is done.
  const auto joined = static_cast<std::uint32_t>(threads - 1 - pool->places.exchange(0));
  std::uint32_t done;
  while ((done = pool->done.load(std::memory_order_acquire)) != joined) {
    wait_for_change(&pool->done, &pool->done_sleepers, done);
  }
  pool->busy.store(false, std::memory_order_release);
}

void Phase::wait(std::int64_t count) const {
  const std::uint64_t start = __rdtsc();
  while (ended_.load(std::memory_order_acquire) < count) {
    if (__rdtsc() - start > kSpinTicks) {
      sched_yield();
    } else {
      _mm_pause();
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
