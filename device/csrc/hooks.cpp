// The hooks by which ATen asks the device for generators, pinned memory and resized storages.
#include "alias.h"
#include "neuron.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace neuron {
namespace {

struct NeuronHooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return config().num_cores > 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex core) const override {
    return default_generator(core);
  }
  at::Generator getNewGenerator(c10::DeviceIndex core) const override {
    return make_generator(core);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(is_pool_pointer(data), "the pointer is no memory of a neuron core");
    return core_device(current_core());
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  bool hasPrimaryContext(c10::DeviceIndex core) const override {
    return core >= 0 && core < config().num_cores;
  }
  void init() const override {
    check_fork();
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(config().num_cores);
  }
  void setCurrentDevice(c10::DeviceIndex core) const override {
    set_current_core(core);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_core());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex core) const override {
    const auto old = getCurrentDevice();
    set_current_core(core);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex core) const override {
    return core < 0 ? getCurrentDevice() : exchangeDevice(core);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

} // namespace

void register_hooks() {
  static auto* hooks = new NeuronHooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
}

} // namespace neuron
