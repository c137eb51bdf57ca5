// Owns which emulated devices there are, which is current, and what was set for them at start.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace emulated {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 64;

struct Settings {
  int devices;         // EMULATED_MUSA_DEVICES
  int arch;            // EMULATED_MUSA_ARCH: 21, 22 or 31
  size_t memory;       // EMULATED_MUSA_MEMORY: bytes of each device
  size_t taken;        // EMULATED_MUSA_TAKEN: of it, what others take after one has asked
  int live_graphs;     // EMULATED_MUSA_LIVE_GRAPHS
  bool old_stack;      // EMULATED_MUSA_STACK=old: torch.accelerator knows no memory
  bool right_out_dtype;   // EMULATED_MUSA_OUT_DTYPE=right: the promised 2.13 fix
  bool double_cast;    // TORCH_USE_MUSA_DOUBLE_CAST, the vendor's own variable
};

// Read from the environment once, when it is first asked for.
const Settings& settings();

int current_device();
void set_current_device(int index);  // raises for an index that does not exist
c10::Stream current_stream(int device);

}  // namespace emulated
