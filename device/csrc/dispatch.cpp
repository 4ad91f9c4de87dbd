// Runs an operator on neuron tensors with its CPU kernel.
//
// `OperatorRunner` is registered on PrivateUse1 for every operator that has a CPU kernel, one instance per operator,
// so that nothing is looked up per call: arguments become CPU aliases, the CPU kernel runs with this core's pool as
// the default allocator, results become neuron tensors again. The order is: check devices, alias, count FLOPs, run,
// map results, write back mutated arguments, record.
#include "alias.h"
#include "neuron.h"
#include "oplog.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <deque>
#include <mutex>
#include <unordered_map>

namespace neuron {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

enum class Kind : uint8_t { tensor, tensor_list, optional_tensor_list, device };

struct Argument {
  int index;
  Kind kind;
  bool is_mutable;
};

bool starts_with(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

// Operators that take host tensors beside device tensors by design, as on CUDA.
bool takes_host_tensors(const std::string& name) {
  static const std::vector<std::string> prefixes = {
      "aten::index", "aten::_index_put_impl", "aten::_unsafe_index", "aten::_fused_", "aten::_pack_padded_sequence",
      "aten::_ctc_loss", "aten::copy", "aten::_copy_from", "aten::set_"};
  if (starts_with(name, "aten::index_")) { // index_add, index_select, ... do not, index_put does
    return starts_with(name, "aten::index_put");
  }
  for (const auto& prefix : prefixes) {
    if (starts_with(name, prefix.c_str())) {
      return true;
    }
  }
  return false;
}

// One argument tensor during a call: what the caller gave and what the CPU kernel gets.
struct Pair {
  at::Tensor device;
  at::Tensor host;
  bool is_mutable;
};

struct Call {
  c10::SmallVector<Pair, 8> pairs;
  int core = -1;
  int64_t bytes = 0;
  at::Tensor host_tensor; // a CPU tensor with dimensions among the arguments
};

class OperatorRunner final : public c10::OperatorKernel {
 public:
  OperatorRunner(const c10::FunctionSchema& schema, bool fallback)
      : id_(op_id(schema.name())),
        flops_(flops_rule(schema.name())),
        mixed_(takes_host_tensors(schema.name())),
        fallback_(fallback),
        num_arguments_(schema.arguments().size()),
        num_returns_(schema.returns().size()),
        name_(schema.name()) {
    for (size_t index = 0; index < num_arguments_; ++index) {
      const auto& argument = schema.arguments()[index];
      const auto* alias = argument.alias_info();
      add_argument(static_cast<int>(index), argument.type(), alias != nullptr && alias->isWrite());
    }
  }

  void operator()(const OperatorHandle& op, DispatchKeySet /*keys*/, Stack* stack) {
    Call call;
    IValue* arguments = stack->data() + (stack->size() - num_arguments_);
    for (const Argument& argument : arguments_) {
      take(call, arguments[argument.index], argument);
    }
    if (call.core < 0) {
      call.core = current_core();
    } else if (C10_UNLIKELY(call.host_tensor.defined() && !mixed_)) {
      refuse_mix(core_device(call.core), call.host_tensor.device());
    }
    if (generator_ >= 0) {
      set_generator(call, arguments[generator_]);
    }
    const bool logging = log_enabled();
    const int64_t flops = logging && flops_ != FlopsRule::none ? count_flops(flops_, arguments) : 0;
    {
      CoreScope scope(call.core);
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    }
    if (mutates_) {
      for (const Pair& pair : call.pairs) {
        if (pair.is_mutable && pair.host.unsafeGetTensorImpl() != pair.device.unsafeGetTensorImpl()) {
          write_back(pair.device, pair.host);
        }
      }
    }
    for (size_t index = stack->size() - num_returns_; index < stack->size(); ++index) {
      give(call, (*stack)[index]);
    }
    if (logging) {
      record(id_, flops, call.bytes, fallback_);
    }
  }

 private:
  void add_argument(int index, const c10::TypePtr& given, bool is_mutable) {
    auto type = given;
    if (auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    if (type->kind() == c10::TypeKind::TensorType) {
      arguments_.push_back({index, Kind::tensor, is_mutable});
    } else if (type->kind() == c10::TypeKind::DeviceObjType) {
      arguments_.push_back({index, Kind::device, false});
    } else if (type->kind() == c10::TypeKind::GeneratorType) {
      generator_ = index;
      return;
    } else if (auto list = type->cast<c10::ListType>()) {
      const auto element = list->getElementType();
      if (element->kind() == c10::TypeKind::TensorType) {
        arguments_.push_back({index, Kind::tensor_list, is_mutable});
      } else if (element->kind() == c10::TypeKind::OptionalType) {
        auto inner = element->expect<c10::OptionalType>()->getElementType();
        if (inner->kind() == c10::TypeKind::TensorType) {
          arguments_.push_back({index, Kind::optional_tensor_list, is_mutable});
        }
      }
    }
    mutates_ = mutates_ || is_mutable;
  }

  [[noreturn]] void refuse_mix(c10::Device one, c10::Device other) const {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other,
        "! (when calling ", name_, ")");
  }

  at::Tensor host_of(Call& call, at::Tensor tensor, bool is_mutable) const {
    if (!tensor.defined()) {
      return tensor;
    }
    const c10::Device device = tensor.device();
    if (C10_LIKELY(device.type() == kNeuron)) {
      if (call.core < 0) {
        call.core = device.index();
      } else if (call.core != device.index()) {
        refuse_mix(core_device(call.core), device);
      }
      call.bytes += tensor_bytes(tensor);
      if (call.pairs.size() < 8) { // the same tensor twice is the same alias twice: kernels compare identities
        for (const Pair& pair : call.pairs) {
          if (pair.device.is_same(tensor) && pair.is_mutable == is_mutable) {
            return pair.host;
          }
        }
      }
      at::Tensor host = host_alias(tensor);
      call.pairs.push_back({std::move(tensor), host, is_mutable});
      return host;
    }
    if (device.type() == c10::kCPU && tensor.dim() > 0 && !call.host_tensor.defined()) {
      call.host_tensor = tensor;
    }
    return tensor;
  }

  void take(Call& call, IValue& value, const Argument& argument) const {
    switch (argument.kind) {
      case Kind::tensor:
        if (value.isTensor()) {
          value = host_of(call, std::move(value).toTensor(), argument.is_mutable);
        }
        break;
      case Kind::tensor_list:
        if (value.isTensorList()) {
          value = host_list(call, value.toTensorList(), argument.is_mutable);
        }
        break;
      case Kind::optional_tensor_list:
        if (value.isOptionalTensorList()) {
          value = host_optionals(call, value.toOptionalTensorList(), argument.is_mutable);
        } else if (value.isTensorList()) {
          value = host_list(call, value.toTensorList(), argument.is_mutable);
        }
        break;
      case Kind::device:
        if (value.isDevice() && value.toDevice().type() == kNeuron) {
          const int index = value.toDevice().index();
          if (call.core < 0) {
            call.core = check_core(index);
          }
          value = c10::Device(c10::kCPU);
        }
        break;
    }
  }

  c10::List<at::Tensor> host_list(Call& call, c10::List<at::Tensor> tensors, bool is_mutable) const {
    c10::List<at::Tensor> hosts;
    hosts.reserve(tensors.size());
    for (size_t index = 0; index < tensors.size(); ++index) {
      hosts.push_back(host_of(call, tensors.get(index), is_mutable));
    }
    return hosts;
  }

  c10::List<std::optional<at::Tensor>> host_optionals(
      Call& call, c10::List<std::optional<at::Tensor>> tensors, bool is_mutable) const {
    c10::List<std::optional<at::Tensor>> hosts;
    hosts.reserve(tensors.size());
    for (size_t index = 0; index < tensors.size(); ++index) {
      std::optional<at::Tensor> tensor = tensors.get(index);
      hosts.push_back(tensor.has_value() ? std::make_optional(host_of(call, std::move(*tensor), is_mutable)) : std::nullopt);
    }
    return hosts;
  }

  void set_generator(const Call& call, IValue& value) const {
    std::optional<at::Generator> given;
    if (value.isGenerator()) {
      given = value.toGenerator();
    }
    value = IValue(inner_generator(call.core, given));
  }

  at::Tensor device_of(Call& call, at::Tensor host) const {
    if (!host.defined() || host.device().type() != c10::kCPU) {
      return host;
    }
    const auto* impl = host.unsafeGetTensorImpl();
    for (const Pair& pair : call.pairs) {
      if (pair.host.unsafeGetTensorImpl() == impl) {
        return pair.device;
      }
      if (call.pairs.size() > 8 && impl->has_storage() && !is_alias_storage(impl->unsafe_storage().unsafeGetStorageImpl())) {
        break; // long lists: a fresh result is recognised without a search
      }
    }
    if (!impl->has_storage()) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          false, "layout ", host.layout(), " is not supported on device neuron (result of ", name_, ")");
    }
    const auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    if (is_alias_storage(storage)) {
      for (const Pair& pair : call.pairs) {
        if (pair.host.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage) {
          return view_of(pair.device, host);
        }
      }
    }
    call.bytes += tensor_bytes(host);
    return to_core(std::move(host), call.core);
  }

  void give(Call& call, IValue& value) const {
    if (value.isTensor()) {
      value = device_of(call, std::move(value).toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> hosts = std::move(value).toTensorList(), results;
      results.reserve(hosts.size());
      for (size_t index = 0; index < hosts.size(); ++index) {
        results.push_back(device_of(call, hosts.extract(index)));
      }
      value = std::move(results);
    }
  }

  const int id_;
  const FlopsRule flops_;
  const bool mixed_;
  const bool fallback_;
  bool mutates_ = false;
  int generator_ = -1;
  const size_t num_arguments_;
  const size_t num_returns_;
  const std::string name_;
  std::vector<Argument> arguments_;
};

// Operators whose CPU form lies under a composite key that a loop over CPU kernels does not see.
bool forced(const c10::OperatorName& name) {
  return starts_with(name.name, "aten::_foreach_") ||
      (name.name == "aten::convolution" && name.overload_name.empty()) ||
      (name.name == "aten::convolution_backward" && name.overload_name.empty());
}

torch::Library& library_of(const std::string& name_space) {
  static std::mutex mutex;
  static auto* libraries = new std::unordered_map<std::string, std::unique_ptr<torch::Library>>();
  std::lock_guard<std::mutex> lock(mutex);
  auto& library = (*libraries)[name_space];
  if (!library) {
    library = std::make_unique<torch::Library>(
        torch::Library::IMPL, name_space, DispatchKey::PrivateUse1, "neuron/dispatch.cpp", 0);
  }
  return *library;
}

int register_where(const std::string& name_space, bool (*extra)(const c10::OperatorName&)) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::string prefix = name_space + "::";
  int registered = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!starts_with(name.name, prefix.c_str())) {
      continue;
    }
    auto handle = dispatcher.findSchema(name);
    if (!handle || handle->hasKernelForDispatchKey(DispatchKey::PrivateUse1) ||
        !(handle->hasKernelForDispatchKey(DispatchKey::CPU) || extra(name))) {
      continue;
    }
    const std::string local = name.name.substr(prefix.size()) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library_of(name_space).impl(
        local.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OperatorRunner>(handle->schema(), false)));
    ++registered;
  }
  return registered;
}

// Everything else that has no kernel for PrivateUse1 and no composite form: third-party operators with a CPU kernel.
void fallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasKernelForDispatchKey(DispatchKey::CPU),
      "Operator ", toString(op.operator_name()), " is not implemented for neuron: it has no kernel for PrivateUse1, none "
      "for CPU and no composite form");
  static std::mutex mutex;
  static auto* runners = new std::unordered_map<c10::OperatorName, std::unique_ptr<OperatorRunner>>();
  OperatorRunner* runner = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto& slot = (*runners)[op.operator_name()];
    if (!slot) {
      slot = std::make_unique<OperatorRunner>(op.schema(), true);
    }
    runner = slot.get();
  }
  (*runner)(op, keys, stack);
}

} // namespace

void register_boxed_operators() {
  register_where("aten", &forced);
  static auto* any = new torch::Library(
      torch::Library::IMPL, "_", DispatchKey::PrivateUse1, "neuron/dispatch.cpp", 0);
  any->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

int register_namespace(const std::string& name_space) {
  return register_where(name_space, [](const c10::OperatorName&) { return false; });
}

} // namespace neuron
