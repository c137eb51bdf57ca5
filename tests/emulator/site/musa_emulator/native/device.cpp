// The guard and the hooks through which torch knows the device. Device and stream are chosen per
// thread, as on the vendor's runtime.
#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>

#include "memory.hpp"
#include "timeline.hpp"

namespace at::native {
void resize_bytes_cpu(c10::StorageImpl* storage, size_t size_bytes);
}

namespace emulated {

namespace {

thread_local int t_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> t_streams{};
std::atomic<c10::StreamId> g_next_stream{1};

int64_t number_in(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::atoll(text) : otherwise;
}

bool says(const char* name, const std::string& word) {
  const char* text = std::getenv(name);
  return text != nullptr && word == text;
}

// MUSA_VISIBLE_DEVICES hides devices from a process: as many are left as it names.
int visible(int devices) {
  const char* text = std::getenv("MUSA_VISIBLE_DEVICES");
  if (text == nullptr) {
    return devices;
  }
  const std::string names(text);
  const auto commas = std::count(names.begin(), names.end(), ',');
  return names.empty() ? 0 : std::min(devices, static_cast<int>(commas) + 1);
}

int index_of(c10::Device device) { return device.index() < 0 ? t_device : device.index(); }

c10::Stream stream_of(int device, c10::StreamId id) {
  const c10::Device place(kDeviceType, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, place, id);
}

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kDeviceType, static_cast<c10::DeviceIndex>(t_device)};
  }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    t_device = index_of(device);
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(index_of(device), g_next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    t_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    Timeline::get().record(*static_cast<Event*>(*event), key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      Timeline::get().wait(*static_cast<Event*>(event), key_of(stream));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Timeline::get().is_done(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      Timeline::get().synchronize(*static_cast<Event*>(event));
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Timeline::get().is_done(key_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Timeline::get().synchronize(key_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    if (settings().old_stack) {
      DeviceGuardImplInterface::synchronizeDevice(index);  // raises, as old stacks do
    }
    Timeline::get().synchronize_device(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    DeviceMemory::get().recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto span =
        static_cast<Event*>(second)->recorded - static_cast<Event*>(first)->recorded;
    return std::chrono::duration<double, std::milli>(span).count();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings().devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DeviceGuard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(t_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return DeviceGuard().exchangeDevice({kDeviceType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* pinned = new PinnedMemory();
    return pinned;
  }
  bool isPinnedPtr(const void* pointer) const override {
    return DeviceMemory::get().is_pinned(pointer);
  }
  at::Device getDeviceFromPtr(void*) const override { return DeviceGuard().getDevice(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

[[maybe_unused]] const bool registered = [] {
  if (settings().old_stack) {
    c10::SetAllocator(kDeviceType, new PlainDeviceMemory());
  } else {
    c10::SetAllocator(kDeviceType, &DeviceMemory::get());
  }
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

const Settings& settings() {
  static const Settings found{
      visible(static_cast<int>(number_in("EMULATED_MUSA_DEVICES", 2))),
      static_cast<int>(number_in("EMULATED_MUSA_ARCH", 31)),
      static_cast<size_t>(number_in("EMULATED_MUSA_MEMORY", int64_t(1) << 30)),
      static_cast<size_t>(number_in("EMULATED_MUSA_TAKEN", 0)),
      static_cast<int>(number_in("EMULATED_MUSA_LIVE_GRAPHS", 2040)),
      says("EMULATED_MUSA_STACK", "old"),
      says("EMULATED_MUSA_OUT_DTYPE", "right"),
      says("TORCH_USE_MUSA_DOUBLE_CAST", "1"),
  };
  return found;
}

int current_device() { return t_device; }

void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < settings().devices, "MUSA error: invalid device ordinal");
  t_device = index;
}

c10::Stream current_stream(int device) { return stream_of(device, t_streams[device]); }

}  // namespace emulated
