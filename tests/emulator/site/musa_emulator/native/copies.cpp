// A copy between host and device that may be late is late: its bytes move when somebody waits for
// them or when its delay is over. Pageable sources are staged at once, as drivers do; copies to
// pageable memory and copies that convert are done before they return.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <memory>

#include "device.hpp"
#include "memory.hpp"
#include "operators.hpp"
#include "timeline.hpp"

namespace emulated {

namespace {

struct Move {
  void* target;
  const void* source;
  size_t bytes;
};

// Moves bytes at the end of the stream's queue. A source that the stream did not wait for gives
// bytes nobody wrote.
void move_later(Move move, StreamKey stream, std::shared_ptr<std::vector<char>> staged) {
  auto& memory = DeviceMemory::get();
  std::lock_guard<std::recursive_mutex> guard(Timeline::get().lock());
  const bool stale = memory.is_stale(move.source, stream);
  if (stale) {
    Timeline::get().note_race("a copy read memory that another stream had not finished writing");
  }
  // Whoever writes there on another stream may as well come later: then nothing is seen of this.
  const bool overtaken = memory.is_stale(move.target, stream);
  if (overtaken) {
    Timeline::get().note_race("a copy wrote memory that another stream had not finished writing");
  }
  memory.hold(move.target, stream);
  memory.hold(move.source, stream);
  const auto number = Timeline::get().enqueue(stream, [move, stream, stale, overtaken, staged] {
    if (stale && !overtaken) {
      std::memset(move.target, 0xff, move.bytes);
    } else if (!overtaken) {
      std::memcpy(move.target, move.source, move.bytes);
    }
    DeviceMemory::get().let_go(move.target, stream);
    DeviceMemory::get().let_go(move.source, stream);
  });
  memory.wrote(move.target, stream, number);
}

bool plain_bytes(const at::Tensor& source, const at::Tensor& target) {
  return source.scalar_type() == target.scalar_type() && source.is_contiguous() &&
         target.is_contiguous() && source.sizes() == target.sizes();
}

bool moved_late(const at::Tensor& source, const at::Tensor& target, StreamKey stream) {
  if (!plain_bytes(source, target) || source.numel() == 0) {
    return false;
  }
  const size_t bytes = source.nbytes();
  const bool to_device = is_ours(target);
  const auto& host = to_device ? source : target;
  if (DeviceMemory::get().is_pinned(host.data_ptr())) {
    move_later({target.data_ptr(), source.data_ptr(), bytes}, stream, nullptr);
    return true;
  }
  if (!to_device) {
    return false;
  }
  const auto* first = static_cast<const char*>(source.data_ptr());
  auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
  move_later({target.data_ptr(), staged->data(), bytes}, stream, staged);
  return true;
}

}  // namespace

void wait_for_results(c10::Device device) {
  Timeline::get().synchronize(key_of(current_stream(device.index())));
}

void copy_values(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool within = is_ours(source) && is_ours(target);
  const auto device = is_ours(target) ? target.device() : source.device();
  const auto stream = key_of(current_stream(device.index()));
  if (!within && non_blocking && moved_late(source, target, stream)) {
    return;
  }
  auto& timeline = Timeline::get();
  if (!within || source.device() != target.device()) {
    timeline.forbid_in_capture("a copy that blocks");
  }
  if (within && source.device() != target.device()) {
    wait_for_results(source.device());
  }
  const auto number = timeline.launch(stream);
  if (is_ours(source) && DeviceMemory::get().is_stale(source.data_ptr(), stream)) {
    timeline.note_race("a blocking copy read memory that another stream had not finished writing");
  }
  if (is_ours(target) && DeviceMemory::get().is_awaited(target.data_ptr(), stream)) {
    timeline.note_race("a blocking copy wrote memory that a late copy still needs");
  }
  on_host(target).copy_(on_host(source));
  if (is_ours(target)) {
    DeviceMemory::get().wrote(target.data_ptr(), stream, number);
  }
  if (!within) {
    timeline.synchronize(stream);
  }
}

}  // namespace emulated
