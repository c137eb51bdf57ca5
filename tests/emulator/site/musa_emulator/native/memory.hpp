// Owns the emulated device's memory: a limit, statistics, and what becomes of a block that is freed
// while a copy of it is still waiting. Device memory is host memory.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <set>
#include <vector>

#include "timeline.hpp"

namespace emulated {

struct Block {
  size_t bytes = 0;
  int device = -1;             // -1: pinned memory of the host
  StreamKey owner{0, 0};       // the stream it was allocated on
  StreamKey writer{-1, -1};    // who wrote to it last
  uint64_t written = 0;
  bool freed = false;
  std::set<StreamKey> recorded;       // streams named by record_stream
  std::vector<StreamKey> waiting;     // streams with a copy of it that is not done
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  static DeviceMemory& get();

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &DeviceMemory::release; }
  void copy_data(void* target, const void* source, size_t bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  c10::DataPtr allocate_pinned(size_t bytes);
  bool is_pinned(const void* pointer);
  void set_limit(int device, size_t bytes);
  // A copy that is not done yet uses the memory behind these pointers.
  void hold(const void* pointer, StreamKey stream);
  void let_go(const void* pointer, StreamKey stream);
  void wrote(const void* pointer, StreamKey stream, uint64_t number);
  // Whether what `reader` would read was written by work it did not wait for.
  bool is_stale(const void* pointer, StreamKey reader);
  // Whether a copy that `writer` did not wait for still has to read or write there.
  bool is_awaited(const void* pointer, StreamKey writer);

 private:
  static void release(void* pointer);
  Block* find(const void* pointer);
  void account(Block& block, int64_t sign);
  void* take(size_t bytes, Block block);
  void drop(void* base);

  std::map<const char*, Block> blocks_;
  std::map<int, c10::CachingDeviceAllocator::DeviceStats> stats_;
  std::map<int, size_t> limits_;
};

// What old stacks register: no statistics to be asked for through torch.accelerator.
class PlainDeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return DeviceMemory::get().allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return DeviceMemory::get().raw_deleter(); }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    DeviceMemory::get().copy_data(target, source, bytes);
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return DeviceMemory::get().allocate_pinned(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return DeviceMemory::get().raw_deleter(); }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    DeviceMemory::get().copy_data(target, source, bytes);
  }
};

}  // namespace emulated
