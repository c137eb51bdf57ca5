// Vector clocks order the streams: a stream has seen what it waited for and what the host had
// waited for when the work was given.
#include "timeline.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>

namespace emulated {

namespace {

constexpr size_t kMostRaces = 100;

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, number] : other) {
    auto& known = into[stream];
    known = std::max(known, number);
  }
}

}  // namespace

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

Timeline& Timeline::get() {
  static auto* timeline = new Timeline();  // never destroyed: its thread outlives main
  return *timeline;
}

Timeline::Timeline() {
  std::thread([this] { work_late(); }).detach();
}

uint64_t Timeline::enqueue(StreamKey stream, std::function<void()> work) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  auto& queue = queues_[stream];
  merge(queue.seen, host_);
  const auto due = std::chrono::steady_clock::now() + delay_;
  queue.waiting.push_back({++queue.issued, queue.seen, due, std::move(work)});
  changed_.notify_all();
  return queue.issued;
}

uint64_t Timeline::launch(StreamKey stream) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  auto& queue = queues_[stream];
  merge(queue.seen, host_);
  run_through(stream, queue.issued);
  run_through(queue.seen);
  queue.done = ++queue.issued;
  return queue.issued;
}

bool Timeline::ordered(StreamKey writer, uint64_t number, StreamKey reader) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  if (writer == reader || host_[writer] >= number) {
    return true;
  }
  const auto& seen = queues_[reader].seen;
  const auto found = seen.find(writer);
  return found != seen.end() && found->second >= number;
}

void Timeline::record(Event& event, StreamKey stream) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  auto& queue = queues_[stream];
  event.clock = queue.seen;
  event.clock[stream] = queue.issued;
  event.recorded = std::chrono::steady_clock::now();
}

void Timeline::wait(const Event& event, StreamKey stream) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  merge(queues_[stream].seen, event.clock);
}

bool Timeline::is_done(const Event& event) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  return std::all_of(event.clock.begin(), event.clock.end(), [this](const auto& entry) {
    return queues_[entry.first].done >= entry.second;
  });
}

bool Timeline::is_done(StreamKey stream) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  return queues_[stream].waiting.empty();
}

void Timeline::synchronize(const Event& event) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  forbid_in_capture("waiting for an event");
  run_through(event.clock);
  host_saw(event.clock);
}

void Timeline::synchronize(StreamKey stream) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  forbid_in_capture("waiting for a stream");
  auto& queue = queues_[stream];
  run_through(stream, queue.issued);
  Clock clock = queue.seen;
  clock[stream] = queue.issued;
  run_through(clock);
  host_saw(clock);
}

void Timeline::synchronize_device(int device) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  forbid_in_capture("waiting for the device");
  std::vector<StreamKey> streams;
  for (const auto& [stream, queue] : queues_) {
    if (stream.first == device) {
      streams.push_back(stream);
    }
  }
  for (const auto& stream : streams) {
    synchronize(stream);
  }
}

void Timeline::set_delay(int64_t milliseconds) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  delay_ = std::chrono::milliseconds(milliseconds);
}

void Timeline::forbid_in_capture(const char* what) const {
  TORCH_CHECK(!capturing, "MUSA error: operation not permitted when stream is capturing (", what,
              ")");
}

void Timeline::note_race(const std::string& text) {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  if (races_.size() < kMostRaces) {
    races_.push_back(text);
  }
}

std::vector<std::string> Timeline::take_races() {
  std::lock_guard<std::recursive_mutex> guard(mutex_);
  return std::exchange(races_, {});
}

void Timeline::run_through(StreamKey stream, uint64_t number) {
  auto& queue = queues_[stream];
  while (queue.done < number && !queue.waiting.empty()) {
    auto work = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    run_through(work.after);
    work.run();
    queue.done = work.number;
  }
}

void Timeline::run_through(const Clock& clock) {
  for (const auto& [stream, number] : clock) {
    run_through(stream, number);
  }
}

void Timeline::host_saw(const Clock& clock) {
  ++host_waits_;
  merge(host_, clock);
}

// The thread that gets late work done when nobody waits for it: a copy always ends some time.
void Timeline::work_late() {
  std::unique_lock<std::recursive_mutex> guard(mutex_);
  while (true) {
    auto next = Instant::max();
    for (auto& entry : queues_) {
      auto& queue = entry.second;
      if (!queue.waiting.empty()) {
        next = std::min(next, queue.waiting.front().due);
      }
    }
    if (next == Instant::max()) {
      changed_.wait(guard);
      continue;
    }
    if (changed_.wait_until(guard, next) == std::cv_status::timeout) {
      const auto now = std::chrono::steady_clock::now();
      for (auto& [stream, queue] : queues_) {
        if (!queue.waiting.empty() && queue.waiting.front().due <= now) {
          run_through(stream, queue.waiting.front().number);
        }
      }
    }
  }
}

}  // namespace emulated
