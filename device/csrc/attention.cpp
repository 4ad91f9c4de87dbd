// Which kernel scaled_dot_product_attention takes: the one the CPU would take.
#include "neuron.h"

#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>

namespace at::native {
namespace {

// Looks at metadata only: it also runs on FakeTensors.
int64_t choose(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  return _fused_sdp_choice_cpp(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
}

} // namespace

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose)

} // namespace at::native
