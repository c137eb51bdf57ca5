// What Python may ask of the emulated device beyond what torch offers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device.hpp"
#include "graph.hpp"
#include "memory.hpp"
#include "timeline.hpp"

PYBIND11_MODULE(_emulated_musa, module) {
  using emulated::DeviceMemory;
  using emulated::Graph;
  using emulated::Timeline;
  module.def("arch", [] { return emulated::settings().arch; });
  module.def("device_count", [] { return emulated::settings().devices; });
  module.def("old_stack", [] { return emulated::settings().old_stack; });
  module.def("set_memory_limit",
             [](int device, size_t bytes) { DeviceMemory::get().set_limit(device, bytes); });
  module.def("set_copy_delay",
             [](int64_t milliseconds) { Timeline::get().set_delay(milliseconds); });
  module.def("host_waits", [] { return Timeline::get().host_waits(); });
  module.def("take_races", [] { return Timeline::get().take_races(); });
  module.def("synchronize",
             [](int device) { Timeline::get().synchronize_device(device); });
  module.def("memory", [](int device) {
    const auto stats = DeviceMemory::get().getDeviceStats(device);
    const auto& held = stats.allocated_bytes[0];
    const auto& reserved = stats.reserved_bytes[0];
    return std::map<std::string, int64_t>{
        {"allocated", held.current},       {"allocated_peak", held.peak},
        {"reserved", reserved.current},    {"reserved_peak", reserved.peak},
        {"out_of_memory", stats.num_ooms}, {"allocations", stats.allocation[0].allocated}};
  });
  module.def("memory_info", [](int device) { return DeviceMemory::get().getMemoryInfo(device); });
  module.def("reset_peak", [](int device) { DeviceMemory::get().resetPeakStats(device); });
  module.def("empty_cache", [] { DeviceMemory::get().emptyCache(); });
  module.def("live_graphs", &Graph::num_live);
  module.def("is_capturing", [] { return Timeline::get().capturing; });
  pybind11::class_<Graph>(module, "Graph")
      .def(pybind11::init<>())
      .def("capture_begin", &Graph::capture_begin)
      .def("capture_end", &Graph::capture_end)
      .def("replay", &Graph::replay)
      .def("reset", &Graph::reset);
}
