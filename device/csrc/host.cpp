// Host memory: the wrapper around the default CPU allocator, pinned memory, and the watch on host allocations.
#include "neuron.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <map>

namespace neuron {
namespace {

thread_local int scope_core = -1;
thread_local int host_copies = 0;
thread_local std::vector<std::string> op_stack;

std::atomic<bool> watching{false};
std::atomic<size_t> watch_threshold{0};
std::mutex watch_mutex;
std::vector<HostAllocation> watched;
at::CallbackHandle watch_handle = at::INVALID_CALLBACK_HANDLE;

void note_host_allocation(size_t bytes) {
  if (C10_LIKELY(!watching.load(std::memory_order_relaxed)) || bytes <= watch_threshold || host_copies > 0) {
    return;
  }
  std::lock_guard<std::mutex> lock(watch_mutex);
  watched.push_back({bytes, op_stack.empty() ? std::string() : op_stack.back()});
}

// Serves the pool of the thread's core inside an operator, and the former default outside.
class HostWrapper final : public c10::Allocator {
 public:
  explicit HostWrapper(c10::Allocator* base) : base_(base) {}
  c10::DataPtr allocate(size_t bytes) override {
    if (scope_core >= 0) {
      return neuron::allocate(scope_core, bytes, c10::Device(c10::kCPU));
    }
    note_host_allocation(bytes);
    return base_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_any;
  }
  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
    return pointer.get_deleter() == &free_block || base_->is_simple_data_ptr(pointer);
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  c10::Allocator* base() const {
    return base_;
  }

 private:
  // A raw pointer may be freed outside the operator that allocated it: its address says where it came from.
  static void free_any(void* pointer);
  c10::Allocator* base_;
};

HostWrapper* wrapper = nullptr;

void HostWrapper::free_any(void* pointer) {
  if (is_pool_pointer(pointer)) {
    free_block(pointer);
  } else {
    wrapper->base()->raw_deleter()(pointer);
  }
}

// "Pinned" host memory: ordinary memory that is remembered as pinned, since copies are synchronous here.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    note_host_allocation(bytes);
    c10::DataPtr inner = wrapper->base()->allocate(bytes);
    void* data = inner.get();
    if (data == nullptr) {
      return inner;
    }
    std::lock_guard<std::mutex> lock(mutex());
    live()[data] = bytes;
    return {data, new c10::DataPtr(std::move(inner)), &release, c10::Device(c10::kCPU)};
  }
  bool contains(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex());
    auto after = live().upper_bound(const_cast<void*>(pointer));
    if (after == live().begin()) {
      return false;
    }
    --after;
    return pointer < static_cast<char*>(after->first) + after->second;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool record_event(void* /*pointer*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static std::mutex& mutex() {
    static auto* instance = new std::mutex();
    return *instance;
  }
  static std::map<void*, size_t>& live() {
    static auto* instance = new std::map<void*, size_t>();
    return *instance;
  }
  static void release(void* context) {
    auto* inner = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard<std::mutex> lock(mutex());
      live().erase(inner->get());
    }
    delete inner;
  }
};

PinnedAllocator* the_pinned() {
  static auto* instance = new PinnedAllocator();
  return instance;
}

struct OpStackEntry : public at::ObserverContext {};

std::unique_ptr<at::ObserverContext> push_op(const at::RecordFunction& record) {
  op_stack.emplace_back(record.name());
  return std::make_unique<OpStackEntry>();
}

void pop_op(const at::RecordFunction& /*record*/, at::ObserverContext* /*context*/) {
  if (!op_stack.empty()) {
    op_stack.pop_back();
  }
}

} // namespace

CoreScope::CoreScope(int core) : previous_(scope_core) {
  scope_core = core;
}

CoreScope::~CoreScope() {
  scope_core = previous_;
}

void install_host_allocators() {
  wrapper = new HostWrapper(c10::GetCPUAllocator());
  c10::SetCPUAllocator(wrapper, /*priority=*/100);
  at::setHostAllocator(kNeuron, the_pinned());
}

c10::Allocator* host_wrapper() {
  return wrapper;
}

bool is_pinned(const void* data) {
  return the_pinned()->contains(data);
}

c10::Allocator* pinned_allocator() {
  return the_pinned();
}

void watch_start(size_t threshold_bytes) {
  std::lock_guard<std::mutex> lock(watch_mutex);
  TORCH_CHECK(!watching, "a watch on host allocations is already active in this process");
  watched.clear();
  watch_threshold = threshold_bytes;
  watch_handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&push_op, &pop_op).scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  watching = true;
}

std::vector<HostAllocation> watch_stop() {
  std::lock_guard<std::mutex> lock(watch_mutex);
  watching = false;
  if (watch_handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(watch_handle);
    watch_handle = at::INVALID_CALLBACK_HANDLE;
  }
  return std::exchange(watched, {});
}

void host_copy_enter() {
  ++host_copies;
}

void host_copy_exit() {
  --host_copies;
}

} // namespace neuron
