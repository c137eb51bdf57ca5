// Owns the order of work on emulated streams: what waits for what, and what has really been done.
// Knows neither tensors nor memory. Copies are done late, by a thread or by whoever waits for them,
// so that reading without waiting finds the old bytes.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

using StreamKey = std::pair<int, int64_t>;     // device index, stream id
using Clock = std::map<StreamKey, uint64_t>;   // "all work of that stream up to this number"
using Instant = std::chrono::steady_clock::time_point;

StreamKey key_of(const c10::Stream& stream);

struct Event {
  Clock clock;
  Instant recorded{};
};

class Timeline {
 public:
  static Timeline& get();

  // Everything here and in the allocator is guarded by this one lock.
  std::recursive_mutex& lock() { return mutex_; }

  // Adds work to be done late and returns its number.
  uint64_t enqueue(StreamKey stream, std::function<void()> work);
  // Does all earlier work of the stream and gives a number to the work the caller does right now.
  uint64_t launch(StreamKey stream);
  // Whether work on `reader` is ordered after the numbered work of `writer`.
  bool ordered(StreamKey writer, uint64_t number, StreamKey reader);

  void record(Event& event, StreamKey stream);
  void wait(const Event& event, StreamKey stream);
  bool is_done(const Event& event);
  bool is_done(StreamKey stream);
  void synchronize(const Event& event);
  void synchronize(StreamKey stream);
  void synchronize_device(int device);
  void set_delay(int64_t milliseconds);
  // Refuses what may not happen while a graph is captured.
  void forbid_in_capture(const char* what) const;

  uint64_t host_waits() const { return host_waits_; }
  void note_race(const std::string& text);
  std::vector<std::string> take_races();
  bool capturing = false;

 private:
  struct Work {
    uint64_t number;
    Clock after;
    Instant due;
    std::function<void()> run;
  };
  struct Queue {
    uint64_t issued = 0;
    uint64_t done = 0;
    Clock seen;
    std::deque<Work> waiting;
  };

  Timeline();
  void run_through(StreamKey stream, uint64_t number);
  void run_through(const Clock& clock);
  void host_saw(const Clock& clock);
  void work_late();

  std::recursive_mutex mutex_;
  std::condition_variable_any changed_;
  std::map<StreamKey, Queue> queues_;
  Clock host_;
  std::chrono::milliseconds delay_{50};
  uint64_t host_waits_ = 0;
  std::vector<std::string> races_;
};

}  // namespace emulated
