// New blocks and blocks freed too early are filled with bytes that read as NaN and -1: what was
// never written, or no longer belongs to the reader, must not look like an answer.
#include "memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device.hpp"

namespace emulated {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSegment = size_t(2) << 20;
constexpr size_t kMostPoisoned = size_t(64) << 20;
constexpr int kPoison = 0xff;
using Guard = std::lock_guard<std::recursive_mutex>;

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

void poison(void* pointer, size_t bytes) {
  std::memset(pointer, kPoison, std::min(bytes, kMostPoisoned));
}

std::string in_mebibytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", double(bytes) / (1 << 20));
  return text;
}

}  // namespace

DeviceMemory& DeviceMemory::get() {
  static auto* memory = new DeviceMemory();
  return *memory;
}

c10::DataPtr DeviceMemory::allocate(size_t bytes) {
  Guard guard(Timeline::get().lock());
  const int device = current_device();
  const c10::Device place(kDeviceType, static_cast<c10::DeviceIndex>(device));
  if (bytes == 0) {
    return {nullptr, nullptr, &DeviceMemory::release, place};
  }
  auto& stats = stats_[device];
  const size_t limit = limits_.count(device) ? limits_[device] : settings().memory;
  const size_t held = stats.allocated_bytes[0].current + settings().taken;
  const size_t free = limit - std::min(limit, held);
  if (bytes > free) {
    ++stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "MUSA out of memory. Tried to allocate ",
                     in_mebibytes(bytes), ". GPU ", device, " has a total capacity of ",
                     in_mebibytes(limit), " of which ", in_mebibytes(free), " is free.");
  }
  Block block;
  block.device = device;
  block.owner = key_of(current_stream(device));
  void* base = take(bytes, block);
  account(blocks_[static_cast<const char*>(base)], 1);
  return {base, base, &DeviceMemory::release, place};
}

c10::DataPtr DeviceMemory::allocate_pinned(size_t bytes) {
  Guard guard(Timeline::get().lock());
  void* base = take(std::max(bytes, size_t(1)), Block{});
  return {base, base, &DeviceMemory::release, c10::Device(c10::kCPU)};
}

void* DeviceMemory::take(size_t bytes, Block block) {
  void* base = std::aligned_alloc(kAlignment, rounded(bytes, kAlignment));
  TORCH_CHECK_WITH(OutOfMemoryError, base != nullptr, "the host has no memory left for MUSA");
  poison(base, bytes);
  block.bytes = bytes;
  blocks_[static_cast<const char*>(base)] = std::move(block);
  return base;
}

void DeviceMemory::account(Block& block, int64_t sign) {
  auto& stats = stats_[block.device];
  const auto change = [sign](c10::CachingAllocator::Stat& stat, size_t amount) {
    sign > 0 ? stat.increase(amount) : stat.decrease(amount);
  };
  change(stats.allocation[0], 1);
  change(stats.active[0], 1);
  change(stats.allocated_bytes[0], block.bytes);
  change(stats.active_bytes[0], block.bytes);
  change(stats.requested_bytes[0], block.bytes);
  const int64_t wanted = rounded(stats.allocated_bytes[0].current, kSegment);
  if (wanted > stats.reserved_bytes[0].current) {
    ++stats.num_device_alloc;
    stats.reserved_bytes[0].increase(wanted - stats.reserved_bytes[0].current);
  }
}

// A block that a copy still waits for stays mapped. Unless the copy's stream owns it or was named
// by record_stream, the device would give it to somebody else at once, so its bytes are spoilt.
void DeviceMemory::release(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  Guard guard(Timeline::get().lock());
  auto& self = get();
  auto& block = self.blocks_.at(static_cast<const char*>(pointer));
  block.freed = true;
  if (block.device >= 0) {
    self.account(block, -1);
    const bool unsafe = std::any_of(
        block.waiting.begin(), block.waiting.end(), [&block](const StreamKey& stream) {
          return stream != block.owner && block.recorded.count(stream) == 0;
        });
    if (unsafe) {
      poison(pointer, block.bytes);
      Timeline::get().note_race("memory was freed while a copy on another stream used it");
    }
  }
  if (block.waiting.empty()) {
    self.drop(pointer);
  }
}

void DeviceMemory::drop(void* base) {
  blocks_.erase(static_cast<const char*>(base));
  std::free(base);
}

Block* DeviceMemory::find(const void* pointer) {
  auto next = blocks_.upper_bound(static_cast<const char*>(pointer));
  if (next == blocks_.begin()) {
    return nullptr;
  }
  auto& [base, block] = *--next;
  return static_cast<const char*>(pointer) < base + block.bytes ? &block : nullptr;
}

bool DeviceMemory::is_pinned(const void* pointer) {
  Guard guard(Timeline::get().lock());
  const auto* block = find(pointer);
  return block != nullptr && block->device < 0;
}

void DeviceMemory::hold(const void* pointer, StreamKey stream) {
  Guard guard(Timeline::get().lock());
  if (auto* block = find(pointer)) {
    block->waiting.push_back(stream);
  }
}

void DeviceMemory::let_go(const void* pointer, StreamKey stream) {
  Guard guard(Timeline::get().lock());
  auto next = blocks_.upper_bound(static_cast<const char*>(pointer));
  if (auto* block = find(pointer)) {
    auto& waiting = block->waiting;
    waiting.erase(std::find(waiting.begin(), waiting.end(), stream));
    if (block->freed && waiting.empty()) {
      drop(const_cast<char*>((--next)->first));
    }
  }
}

void DeviceMemory::wrote(const void* pointer, StreamKey stream, uint64_t number) {
  Guard guard(Timeline::get().lock());
  if (auto* block = find(pointer)) {
    block->writer = stream;
    block->written = number;
  }
}

bool DeviceMemory::is_stale(const void* pointer, StreamKey reader) {
  Guard guard(Timeline::get().lock());
  const auto* block = find(pointer);
  return block != nullptr && block->device >= 0 && block->written != 0 &&
         !Timeline::get().ordered(block->writer, block->written, reader);
}

bool DeviceMemory::is_awaited(const void* pointer, StreamKey writer) {
  Guard guard(Timeline::get().lock());
  const auto* block = find(pointer);
  return block != nullptr && block->device >= 0 &&
         std::any_of(block->waiting.begin(), block->waiting.end(),
                     [writer](const StreamKey& stream) { return stream != writer; });
}

void DeviceMemory::set_limit(int device, size_t bytes) {
  Guard guard(Timeline::get().lock());
  limits_[device] = bytes;
}

void DeviceMemory::copy_data(void* target, const void* source, size_t bytes) const {
  std::memcpy(target, source, bytes);
}

void DeviceMemory::emptyCache(c10::MempoolId_t) {
  Guard guard(Timeline::get().lock());
  for (auto& [device, stats] : stats_) {
    const int64_t needed = rounded(stats.allocated_bytes[0].current, kSegment);
    if (needed < stats.reserved_bytes[0].current) {
      ++stats.num_device_free;
      stats.reserved_bytes[0].decrease(stats.reserved_bytes[0].current - needed);
    }
  }
}

void DeviceMemory::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  Guard guard(Timeline::get().lock());
  if (auto* block = find(pointer.get())) {
    block->recorded.insert(key_of(stream));
  }
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  Guard guard(Timeline::get().lock());
  return stats_[device];
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
  Guard guard(Timeline::get().lock());
  auto& stats = stats_[device];
  for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes}) {
    (*stat)[0].reset_accumulated();
  }
  stats.num_ooms = 0;
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  Guard guard(Timeline::get().lock());
  auto& stats = stats_[device];
  for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes,
                     &stats.active, &stats.active_bytes, &stats.requested_bytes}) {
    (*stat)[0].reset_peak();
  }
}

std::pair<size_t, size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex device) {
  Guard guard(Timeline::get().lock());
  const size_t limit = limits_.count(device) ? limits_[device] : settings().memory;
  const size_t reserved = stats_[device].reserved_bytes[0].current;
  return {limit - std::min(limit, reserved), limit};
}

}  // namespace emulated
