// An alias has a StorageImpl of its own with device CPU: views made inside CPU kernels take their device from the
// storage, so a re-tagged TensorImpl over the neuron storage would produce neuron views there.
#include "alias.h"

#include <c10/core/TensorImpl.h>

#include <cstring>

namespace neuron {
namespace {

void keep(void* /*context*/) {} // deleter of a non-owning alias; its address marks alias storages

void drop_owner(void* context) { // deleter of an owning alias; the context is a reference to the neuron storage
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

c10::intrusive_ptr<c10::StorageImpl> make_alias(void* data, void* context, c10::DeleterFnPtr deleter, size_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      c10::SymInt(static_cast<int64_t>(bytes)),
      c10::DataPtr(data, context, deleter, c10::Device(c10::kCPU)),
      host_wrapper(),
      /*resizable=*/true);
}

// The alias cached in the block of a pool storage; made once, by whichever thread comes first.
c10::intrusive_ptr<c10::StorageImpl> cached_alias(c10::StorageImpl* storage, void* data) {
  auto* block = reinterpret_cast<Block*>(static_cast<char*>(data) - kHeader);
  auto* alias = block->alias.load(std::memory_order_acquire);
  if (C10_UNLIKELY(alias == nullptr)) {
    auto made = make_alias(data, data, &keep, storage->nbytes());
    if (block->alias.compare_exchange_strong(alias, made.get())) {
      alias = made.release();
    }
  }
  if (alias->nbytes() != storage->nbytes()) {
    alias->set_nbytes(storage->nbytes());
  }
  return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(alias);
}

c10::intrusive_ptr<c10::StorageImpl> alias_storage(c10::StorageImpl* storage) {
  const c10::DataPtr& pointer = storage->_mutable_data_ptr_no_checks();
  if (C10_LIKELY(pointer.get_deleter() == &free_block && pointer.get() != nullptr)) {
    return cached_alias(storage, pointer.get());
  }
  c10::raw::intrusive_ptr::incref(storage);
  return make_alias(pointer.get(), storage, &drop_owner, storage->nbytes());
}

c10::DispatchKeySet kept_bits(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet bits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return tensor.key_set() & bits;
}

at::Tensor make_tensor(c10::Storage&& storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* source = like.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(source->sizes(), source->strides(), source->storage_offset());
  if (source->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return at::Tensor(std::move(impl));
}

// `device_opt_` is protected; a pointer to member formed in a derived class reaches it.
struct DeviceField : c10::TensorImpl {
  static std::optional<c10::Device> c10::TensorImpl::* get() {
    return &DeviceField::device_opt_;
  }
};

void retag_storage(c10::StorageImpl* storage, int core) {
  c10::DataPtr& pointer = storage->_mutable_data_ptr_no_checks();
  const auto deleter = pointer.get_deleter();
  if (deleter == &free_block || pointer.get() == nullptr) {
    pointer.unsafe_set_device(core_device(core));
  } else {
    storage->set_data_ptr_noswap(adopt(core, std::move(pointer), storage->nbytes()));
  }
  storage->set_allocator(device_allocator());
}

} // namespace

bool is_alias_storage(const c10::StorageImpl* storage) {
  const auto deleter = storage->data_ptr().get_deleter();
  return deleter == &keep || deleter == &drop_owner;
}

at::Tensor host_alias(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided && !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::NestedTensorPrivateUse1),
      "layout ", tensor.layout(), " is not supported on device neuron");
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  TORCH_CHECK(storage, "a neuron tensor without storage reached an operator");
  c10::Storage alias(alias_storage(storage.unsafeGetStorageImpl()));
  return make_tensor(std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU) | kept_bits(tensor), tensor);
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& view) {
  c10::Storage storage(base.unsafeGetTensorImpl()->unsafe_storage());
  return make_tensor(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | kept_bits(view), view);
}

void write_back(const at::Tensor& tensor, const at::Tensor& alias) {
  auto* target = tensor.unsafeGetTensorImpl();
  auto* source = alias.unsafeGetTensorImpl();
  auto* storage = target->unsafe_storage().unsafeGetStorageImpl();
  auto* shadow = source->unsafe_storage().unsafeGetStorageImpl();
  const c10::DataPtr& old = storage->_mutable_data_ptr_no_checks();
  if (!is_alias_storage(shadow)) {
    // The kernel resized the alias: its new memory moves to the neuron storage. The alias, perhaps cached in the old
    // block, points to the old memory again before that is freed.
    const bool pooled = old.get_deleter() == &free_block && old.get() != nullptr;
    const auto bytes = shadow->nbytes();
    c10::DataPtr fresh;
    std::swap(fresh, shadow->_mutable_data_ptr_no_checks());
    shadow->set_data_ptr_noswap(c10::DataPtr(old.get(), pooled ? old.get() : nullptr, &keep, c10::Device(c10::kCPU)));
    const int core = static_cast<int>(storage->device().index());
    fresh.unsafe_set_device(core_device(core));
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
  } else if (shadow->nbytes() != storage->nbytes()) {
    storage->set_nbytes(shadow->nbytes());
  }
  if (source->sizes() != target->sizes() || source->strides() != target->strides() ||
      source->storage_offset() != target->storage_offset()) {
    target->set_sizes_and_strides(source->sizes(), source->strides(), source->storage_offset());
  }
}

at::Tensor to_core(at::Tensor result, int core) {
  auto* impl = result.unsafeGetTensorImpl();
  if (!impl->has_storage() || result.device().type() != c10::kCPU) {
    return result;
  }
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (storage->device_type() == c10::kCPU) {
    retag_storage(storage, core);
  }
  if (C10_UNLIKELY(result.use_count() > 1)) {
    return view_of(result, result);
  }
  impl->_change_backend_component_keys(core_device(core));
  impl->*DeviceField::get() = core_device(core);
  return result;
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const c10::Device device = storage->device();
  c10::DataPtr fresh = allocate(device.index(), bytes, device);
  const size_t common = std::min(bytes, storage->nbytes());
  if (common > 0) {
    std::memcpy(fresh.get(), storage->data(), common);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

} // namespace neuron
