// The Python face of the backend: `device/runtime.py` imports it as the module `rlneuron_neuron`.
#include "neuron.h"
#include "oplog.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/python_headers.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

void activate(int num_cores, size_t hbm_bytes) {
  TORCH_CHECK(num_cores >= 1 && num_cores <= neuron::kMaxCores, "1 to ", neuron::kMaxCores, " cores, got ", num_cores);
  neuron::config() = {num_cores, hbm_bytes};
  neuron::install_host_allocators();
  neuron::register_device_allocator();
  neuron::register_hooks();
  neuron::register_boxed_operators();
  neuron::install_fork_guard();
}

py::dict memory(int core) {
  const auto usage = neuron::usage(core);
  py::dict result;
  const auto put = [&result](const char* name, const c10::CachingAllocator::StatArray& array) {
    const auto& stat = array[0];
    const std::string prefix(name);
    result[py::str(prefix + ".current")] = stat.current;
    result[py::str(prefix + ".peak")] = stat.peak;
    result[py::str(prefix + ".allocated")] = stat.allocated;
    result[py::str(prefix + ".freed")] = stat.freed;
  };
  put("allocated_bytes", usage.stats.allocated_bytes);
  put("reserved_bytes", usage.stats.reserved_bytes);
  put("active_bytes", usage.stats.active_bytes);
  result["num_alloc_retries"] = usage.stats.num_alloc_retries;
  result["num_ooms"] = usage.stats.num_ooms;
  result["num_tensor_frees"] = usage.tensor_frees;
  result["allocation_requests"] = usage.requests;
  return result;
}

py::tuple totals() {
  const auto total = neuron::log_totals();
  return py::make_tuple(total.ops, total.flops, total.bytes);
}

py::list by_operator() {
  py::list result;
  for (const auto& count : neuron::log_by_operator()) {
    result.append(py::make_tuple(count.name, count.ops, count.flops, count.bytes, count.fallbacks));
  }
  return result;
}

py::list watch_stop() {
  py::list result;
  for (const auto& allocation : neuron::watch_stop()) {
    result.append(py::make_tuple(allocation.bytes, allocation.op));
  }
  return result;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("activate", &activate);
  m.def("set_hbm_bytes", [](size_t bytes) { neuron::config().hbm_bytes = bytes; });
  m.def("hbm_bytes", [] { return neuron::config().hbm_bytes; });
  m.def("num_cores", [] { return neuron::config().num_cores; });
  m.def("current_core", &neuron::current_core);
  m.def("set_current_core", &neuron::set_current_core);
  m.def("check_core", &neuron::check_core);
  m.def("in_bad_fork", &neuron::in_bad_fork);
  m.def("check_fork", &neuron::check_fork);
  m.def("register_namespace", &neuron::register_namespace);
  m.def("default_generator", [](int core) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(neuron::default_generator(core)));
  });
  m.def("memory", &memory);
  m.def("reset_peak", [](int core) { neuron::device_allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(core)); });
  m.def("reset_accumulated", [](int core) {
    neuron::device_allocator()->resetAccumulatedStats(static_cast<c10::DeviceIndex>(core));
  });
  m.def("empty_cache", [] { neuron::device_allocator()->emptyCache(); });
  m.def("log_enable", &neuron::log_enable);
  m.def("log_reset", &neuron::log_reset);
  m.def("log_totals", &totals);
  m.def("log_by_operator", &by_operator);
  m.def("watch_start", &neuron::watch_start);
  m.def("watch_stop", &watch_stop);
  m.def("host_copy_enter", &neuron::host_copy_enter);
  m.def("host_copy_exit", &neuron::host_copy_exit);
}
