// The operator log: counts, FLOPs and bytes per operator.
//
// This is also where prices will enter: the signature of a call (operator, shapes, dtypes) is known in `record`.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace neuron {

// How the FLOPs of an operator follow from its inputs (a multiply-add is two).
enum class FlopsRule : uint8_t { none, mm, addmm, bmm, baddbmm, mv, addmv, dot, linear, attention, attention_backward,
                                 convolution, convolution_backward, paged_attention, varlen_attention,
                                 varlen_attention_backward };

struct OpTotals {
  int64_t ops;
  int64_t flops;
  int64_t bytes;
};
struct OpCount {
  std::string name;
  int64_t ops;
  int64_t flops;
  int64_t bytes;
  int64_t fallbacks;
};

// Gives the operator an id; the same name gives the same id.
int op_id(const std::string& name);
FlopsRule flops_rule(const std::string& name);

// FLOPs of one call from its arguments before the call; 0 for FlopsRule::none.
int64_t count_flops(FlopsRule rule, const c10::IValue* arguments);

bool log_enabled();
void log_enable(bool on);
void log_reset();
void record(int id, int64_t flops, int64_t bytes, bool fallback = false);
OpTotals log_totals();
std::vector<OpCount> log_by_operator();

inline int64_t tensor_bytes(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.itemsize());
}

} // namespace neuron
