// Owns a small pool of worker threads: a bounded spin, then sleep, so that ranks can share cores.
// It refuses to know what the work is.
#pragma once
#include <cstdint>

namespace firstlight {

// Calls body(context, thread, threads) once on each of `threads` threads, the caller being thread
// 0, and returns when all are done. When another caller holds the pool, or threads is 1, the body
// runs alone as thread 0 of 1. Bodies must not call run_threads. A forked child starts new workers.
using ThreadBody = void (*)(void* context, int thread, int threads);
void run_threads(int threads, ThreadBody body, void* context);

// Meets all threads of the running body; spins a little, then yields the core.
void thread_barrier(int threads);

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

}  // namespace firstlight
