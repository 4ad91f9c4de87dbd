// The current core and stream of each thread, streams, events, and what a forked child may do.
#include "neuron.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdlib>

namespace neuron {
namespace {

thread_local int thread_core = -1;
thread_local std::array<c10::StreamId, kMaxCores> thread_streams{};
std::atomic<c10::StreamId> next_stream{1};
std::atomic<bool> used{false};
std::atomic<bool> bad_fork{false};

// accelerate never calls set_device for neuron: a process of a launcher starts on the core of its rank.
int initial_core() {
  const char* rank = std::getenv("LOCAL_RANK");
  char* end = nullptr;
  const long value = rank == nullptr ? 0 : std::strtol(rank, &end, 10);
  if (rank == nullptr || *rank == '\0' || *end != '\0' || value < 0) {
    return 0;
  }
  return static_cast<int>(value % config().num_cores);
}

// Work is done when the call returns, so an event is complete as soon as it is recorded.
struct Event {
  bool recorded = true;
};

struct NeuronGuard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kNeuron;
  c10::DeviceType type() const override {
    return kNeuron;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override {
    return core_device(current_core());
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kNeuron, "expected a neuron device, got ", device);
    if (device.index() >= 0) {
      set_current_core(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < config().num_cores) {
      thread_core = device.index();
    }
  }
  c10::Stream stream_of(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, core_device(check_core(device.index())), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, thread_streams[check_core(device.index())]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return stream_of(device, next_stream++);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return stream_of(device, next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream old = getStream(stream.device());
    thread_streams[check_core(stream.device_index())] = stream.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(config().num_cores);
  }
  void record(void** event, const c10::Stream& /*stream*/, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override {
    return true;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeEvent(void* /*event*/) const override {}
  void synchronizeDevice(c10::DeviceIndex core) const override {
    check_core(core);
  }
  double elapsedTime(void* /*start*/, void* /*end*/, c10::DeviceIndex) const override {
    TORCH_CHECK(false, "no cost model: the simulated neuron device does not price operators, so events have no time");
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, NeuronGuard)

} // namespace

Config& config() {
  static Config instance;
  return instance;
}

int current_core() {
  if (C10_UNLIKELY(thread_core < 0)) {
    thread_core = initial_core();
  }
  return thread_core;
}

int check_core(int core) {
  if (core == -1) {
    return current_core();
  }
  TORCH_CHECK(
      core >= 0 && core < config().num_cores, "neuron:", core, " does not exist: this process sees ", config().num_cores,
      " logical core(s), indices 0 to ", config().num_cores - 1);
  return core;
}

void set_current_core(int core) {
  thread_core = check_core(core);
}

void mark_used() {
  if (C10_UNLIKELY(bad_fork.load(std::memory_order_relaxed))) {
    check_fork();
  }
  if (C10_UNLIKELY(!used.load(std::memory_order_relaxed))) {
    used = true;
  }
}

void install_fork_guard() {
  pthread_atfork(nullptr, nullptr, [] {
    if (used) {
      bad_fork = true;
    }
  });
}

bool in_bad_fork() {
  return bad_fork;
}

void check_fork() {
  TORCH_CHECK(
      !bad_fork, "Cannot re-initialize the neuron device in a forked subprocess. To use neuron with multiprocessing, "
      "use the 'spawn' start method");
}

} // namespace neuron
