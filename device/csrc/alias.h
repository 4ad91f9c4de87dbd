// Neuron tensors seen as CPU tensors, and back. No element is ever copied here.
#pragma once

#include "neuron.h"

#include <ATen/core/Tensor.h>

namespace neuron {

inline bool is_neuron(const at::Tensor& tensor) {
  return tensor.device().type() == kNeuron;
}

// A CPU tensor over the memory of `tensor` (strided). It does not own the memory: it lives no longer than the call,
// unless somebody keeps it, and then `free_block` makes it the owner.
at::Tensor host_alias(const at::Tensor& tensor);

// Writes back what an operator did to an alias beyond its elements: a resized storage, new sizes and strides.
void write_back(const at::Tensor& tensor, const at::Tensor& alias);

// Turns a fresh CPU result into a tensor of `core`: its storage is re-tagged, foreign memory is adopted and counted.
at::Tensor to_core(at::Tensor result, int core);

// A tensor with the metadata of `view` over the storage of the neuron tensor `base`.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& view);

// Whether the storage is an alias made by `host_alias`.
bool is_alias_storage(const c10::StorageImpl* storage);

// Grows or shrinks a neuron storage in place, keeping the common prefix.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

} // namespace neuron
