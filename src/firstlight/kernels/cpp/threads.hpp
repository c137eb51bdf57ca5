// Owns a small pool of worker threads: a bounded spin, then sleep, so that ranks can share cores.
// It refuses to know what the work is.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

namespace firstlight {

// Calls body(context, thread, threads) on up to `threads` threads, the caller being thread 0, and
// returns when all calls ended. Bodies claim their work from a shared counter, because a worker that
// gets no core before the caller is through isn't waited for and takes no part. When another caller
// holds the pool, or threads is 1, the body runs alone. Bodies must not call run_threads. A forked
// child starts new workers.
using ThreadBody = void (*)(void* context, int thread, int threads);
void run_threads(int threads, ThreadBody body, void* context);

// Scratch memory of the calling thread, 64-byte aligned, kept until the thread ends and never
// shrunk; each slot (0..3) is a separate block. Throws std::bad_alloc.
void* thread_scratch(int slot, std::int64_t bytes);

template <class Function>
void on_threads(int threads, Function&& function) {
  run_threads(
      threads,
      [](void* context, int thread, int count) {
        (*static_cast<Function*>(context))(thread, count);
      },
      &function);
}

// Calls function(begin, end) for pieces of [0, count) of at most `grain`, on up to `threads` threads.
template <class Function>
void each_piece(int threads, std::int64_t count, std::int64_t grain, Function&& function) {
  std::atomic<std::int64_t> claimed{0};
  on_threads(count <= grain ? 1 : threads, [&](int, int) {
    for (std::int64_t begin; (begin = claimed.fetch_add(grain)) < count;) {
      function(begin, std::min(count, begin + grain));
    }
  });
}

// One of several phases of work inside a single on_threads body. run() claims pieces until none is
// left and returns when all of them ended, whichever threads took part: a worker that comes late
// finds nothing to do and goes on to the next phase.
class Phase {
 public:
  template <class Function>
  void run(std::int64_t count, Function&& function) {
    for (std::int64_t piece; (piece = claimed_.fetch_add(1)) < count;) {
      function(piece);
      ended_.fetch_add(1, std::memory_order_release);
    }
    wait(count);
  }

 private:
  void wait(std::int64_t count) const;  // spins briefly, then gives the core away

  alignas(64) std::atomic<std::int64_t> claimed_{0};
  alignas(64) std::atomic<std::int64_t> ended_{0};
};

}  // namespace firstlight
