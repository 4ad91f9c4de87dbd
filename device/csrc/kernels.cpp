// Operators that need more than an alias: factories, views, copies between devices, set_, dropout.
#include "alias.h"
#include "oplog.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/_copy_from_ops.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <functional>

namespace neuron {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// The allocator of a given core, as ATen's factories want one.
class CoreAllocator final : public c10::Allocator {
 public:
  explicit CoreAllocator(int core) : core_(core) {}
  c10::DataPtr allocate(size_t bytes) override {
    return neuron::allocate(core_, bytes, core_device(core_));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

 private:
  int core_;
};

// The storage keeps `device_allocator()` for later resizes; only the first allocation needs the core.
void own_by_device_allocator(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->set_allocator(device_allocator());
}

void check_factory(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(c10::kStrided) == c10::kStrided, "layout ", layout.value_or(c10::kStrided),
      " is not supported on device neuron");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned, not tensors of device neuron");
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  check_factory(layout, pin_memory);
  CoreAllocator allocator(check_core(device.has_value() ? device->index() : -1));
  at::Tensor result = at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
  own_by_device_allocator(result);
  return result;
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_factory(layout, pin_memory);
  CoreAllocator allocator(check_core(device.has_value() ? device->index() : -1));
  at::Tensor result = at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
  own_by_device_allocator(result);
  return result;
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

// Registered for PrivateUse1 itself, not as `_copy_from`: with that alone conjugated tensors recurse for ever.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  static const int id = op_id("aten::copy_");
  const bool to_neuron = is_neuron(self), from_neuron = is_neuron(source);
  for (const at::Tensor& tensor : {std::cref<at::Tensor>(self), std::cref<at::Tensor>(source)}) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        is_neuron(tensor) || tensor.device().is_cpu(), "copy between ", source.device(), " and ", self.device(),
        " is not supported");
  }
  const int core = (to_neuron ? self : source).device().index();
  const at::Tensor host = to_neuron ? host_alias(self) : self;
  {
    CoreScope scope(core);
    at::_ops::copy_::redispatch(
        c10::DispatchKeySet(c10::DispatchKey::CPU), const_cast<at::Tensor&>(host),
        from_neuron ? host_alias(source) : source, non_blocking);
  }
  if (log_enabled()) {
    record(id, 0, tensor_bytes(self) + tensor_bytes(source));
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::Tensor result = target;
  return copy_(result, source, non_blocking);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device() == self.device(), "set_: the tensor is on ", self.device(), ", the storage on ", source.device());
  TORCH_CHECK(offset >= 0, "set_: storage_offset ", offset, " is negative");
  c10::SmallVector<int64_t, 6> strides(stride.begin(), stride.end());
  if (stride.empty() && !size.empty()) {
    strides.resize(size.size());
    int64_t step = 1;
    for (size_t axis = size.size(); axis-- > 0;) {
      strides[axis] = step;
      step *= std::max<int64_t>(size[axis], 1);
    }
  }
  TORCH_CHECK(strides.size() == size.size(), "set_: ", size.size(), " sizes and ", strides.size(), " strides");
  const size_t needed = at::detail::computeStorageNbytes(size, strides, self.itemsize(), offset);
  if (needed > source.nbytes()) {
    TORCH_CHECK(source.resizable(), "set_: the storage has ", source.nbytes(), " bytes, ", needed, " are needed");
    resize_storage(source.unsafeGetStorageImpl(), needed);
  }
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return self.is_same(source) ? self : set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  at::Tensor nothing = empty({0}, self.scalar_type(), {}, self.device(), {}, {});
  return set_tensor(self, nothing);
}

// `native_dropout` has no generator argument. The CPU draws the noise in the input's dtype, so do we: same numbers.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0 || !train.value_or(true) || p == 0.0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  if (p == 1.0) {
    return {at::zeros_like(input), at::zeros_like(input, input.options().dtype(at::kBool))};
  }
  at::Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  at::Tensor mask = noise.to(at::kBool);
  return {at::mul(input, noise.div_(1 - p)), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  return at::mul(gradient, at::mul(mask.to(gradient.scalar_type()), scale));
}

// Whether `tensor.data = other` may change one into the other. ATen's list of dense backends lacks PrivateUse1, so
// `module.to("neuron")` would replace parameters instead of changing them: tied weights would come apart.
bool has_compatible_type(const at::Tensor& tensor, const at::Tensor& other) {
  const auto dense = [](const at::Tensor& one) {
    return one.layout() == c10::kStrided && !one.is_nested() && (is_neuron(one) || one.device().is_cpu());
  };
  return tensor.key_set() == other.key_set() || (dense(tensor) && dense(other));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("view", &view);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("set_", &set_nothing);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("native_dropout", &native_dropout);
  library.impl("native_dropout_backward", &native_dropout_backward);
}

} // namespace neuron
