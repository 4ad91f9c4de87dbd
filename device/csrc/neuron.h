// The simulated neuron device: what the files of this folder share.
//
// A logical NeuronCore is `neuron:i`. Its memory (HBM) is host memory of a pool of its own (allocator.cpp). An operator
// runs the CPU kernel on aliases of that memory (dispatch.cpp, alias.cpp); while it runs, the default CPU allocator
// hands out blocks of the same core's pool (host.cpp), so outputs and temporaries count against the core's HBM.
// Everything here may be called from any thread unless said otherwise.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <string>
#include <utility>
#include <vector>

namespace neuron {

constexpr c10::DeviceType kNeuron = c10::DeviceType::PrivateUse1;
constexpr int kMaxCores = 128;

inline c10::Device core_device(int core) {
  return c10::Device(kNeuron, static_cast<c10::DeviceIndex>(core));
}

// ---- configuration (module.cpp sets it once, before the first tensor) ----
struct Config {
  int num_cores = 1;
  size_t hbm_bytes = size_t(24) << 30; // of one logical core
};
Config& config();

// ---- the current core of this thread (guard.cpp) ----
int current_core();
void set_current_core(int core); // TORCH_CHECKs the range
int check_core(int core); // -1 means the current one

// ---- memory of a core (allocator.cpp) ----
// What lies in the 64 bytes before a pool block's data.
struct Block {
  uint32_t magic;
  int16_t core;
  bool small;
  size_t capacity; // bytes of data that fit
  size_t charged; // bytes counted against HBM while the block is in use
  std::atomic<c10::StorageImpl*> alias; // the non-owning CPU alias, made on first use, owned by the block
  Block* next; // in the free list of small blocks
  uint64_t age; // when a large block was last freed
};
constexpr size_t kHeader = 64;
static_assert(sizeof(Block) <= kHeader);

// Memory that some other allocator made and that a neuron storage took over (numpy, from_blob, mmap).
struct Adopted {
  c10::DataPtr inner;
  int core;
  size_t charged;
};

// A block of `core` as a DataPtr with device tag `device`; throws torch.OutOfMemoryError at the HBM limit.
c10::DataPtr allocate(int core, size_t bytes, c10::Device device);
// Counts foreign memory against `core` until it is freed; throws as `allocate`.
c10::DataPtr adopt(int core, c10::DataPtr&& inner, size_t bytes);
void free_block(void* context); // the deleter of `allocate`
void free_adopted(void* context); // the deleter of `adopt`
bool is_pool_pointer(const void* data); // data of a live or cached pool block
c10::DeviceAllocator* device_allocator();
void register_device_allocator();
struct Usage {
  c10::CachingDeviceAllocator::DeviceStats stats;
  int64_t tensor_frees;
  int64_t requests;
};
Usage usage(int core);

// ---- host memory (host.cpp) ----
// While alive, the default CPU allocator of this thread hands out memory of `core`.
class CoreScope {
 public:
  explicit CoreScope(int core);
  ~CoreScope();
  CoreScope(const CoreScope&) = delete;
  CoreScope& operator=(const CoreScope&) = delete;

 private:
  int previous_;
};
void install_host_allocators();
c10::Allocator* host_wrapper();
bool is_pinned(const void* data);
c10::Allocator* pinned_allocator();
struct HostAllocation {
  size_t bytes;
  std::string op; // the innermost ATen operator of the thread, empty outside any
};
void watch_start(size_t threshold_bytes);
std::vector<HostAllocation> watch_stop();
void host_copy_enter();
void host_copy_exit();

// ---- fork (guard.cpp) ----
void mark_used(); // called by the first allocation
void install_fork_guard();
bool in_bad_fork();
void check_fork(); // throws in a child of a process that had used the device

// ---- generators (generator.cpp) ----
const at::Generator& default_generator(int core);
at::Generator make_generator(int core);
// The CPU generator inside a neuron generator (the default one of `core` if `given` is absent).
at::Generator inner_generator(int core, const std::optional<at::Generator>& given);

// ---- registration steps, called by module.cpp in this order ----
void register_hooks();
void register_boxed_operators();
int register_namespace(const std::string& name_space);

} // namespace neuron
