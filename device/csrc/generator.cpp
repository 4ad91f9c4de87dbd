// Random numbers: a neuron generator wraps a CPU generator, so one seed gives the CPU's numbers on every core.
#include "neuron.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <array>
#include <mutex>

namespace neuron {
namespace {

class NeuronGenerator final : public c10::GeneratorImpl {
 public:
  NeuronGenerator(int core, at::Generator inner)
      : c10::GeneratorImpl(core_device(core), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner_(std::move(inner)) {}
  const at::Generator& inner() const {
    return inner_;
  }
  void set_current_seed(uint64_t seed) override {
    inner_.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner_.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner_.get_offset();
  }
  uint64_t current_seed() const override {
    return inner_.current_seed();
  }
  uint64_t seed() override {
    return inner_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  NeuronGenerator* clone_impl() const override {
    return new NeuronGenerator(device().index(), inner_.clone());
  }
  at::Generator inner_;
};

} // namespace

at::Generator make_generator(int core) {
  return at::make_generator<NeuronGenerator>(check_core(core), at::detail::createCPUGenerator());
}

const at::Generator& default_generator(int core) {
  static std::mutex mutex;
  static auto* generators = new std::array<at::Generator, kMaxCores>();
  std::lock_guard<std::mutex> lock(mutex);
  auto& generator = (*generators)[check_core(core)];
  if (!generator.defined()) {
    generator = make_generator(core);
  }
  return generator;
}

at::Generator inner_generator(int core, const std::optional<at::Generator>& given) {
  const at::Generator generator = given.has_value() && given->defined() ? *given : default_generator(core);
  TORCH_CHECK(
      generator.device().type() == kNeuron, "Expected a 'neuron' device type for generator but found '",
      generator.device().type(), "'");
  return static_cast<NeuronGenerator*>(generator.unsafeGetGeneratorImpl())->inner();
}

} // namespace neuron
