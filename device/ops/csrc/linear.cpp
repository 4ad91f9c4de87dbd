// CPU kernels of rlneuron::linear and rlneuron::mm (schemas and reasons: device/ops/linear.py): float32 products
// through oneDNN's inner product, which torch exposes as mkldnn::_linear_pointwise; everything else as torch does it.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>
#include <string_view>

namespace {

using at::Tensor;

using Pointwise = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, c10::string_view,
                         c10::List<std::optional<at::Scalar>>, std::optional<c10::string_view>);

// oneDNN's operator, or nothing in a torch that was built without it.
const std::optional<c10::TypedOperatorHandle<Pointwise>>& one_dnn() {
  static const auto handle = [] {
    std::optional<c10::TypedOperatorHandle<Pointwise>> found;
    const auto any = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (at::hasMKLDNN() && any.has_value()) found = any->typed<Pointwise>();
    return found;
  }();
  return handle;
}

Tensor linear_kernel(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const bool ours = x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && x.dim() >= 2 &&
                    weight.dim() == 2 && x.numel() > 0 && weight.numel() > 0 && x.size(-1) == weight.size(1) &&
                    at::globalContext().userEnabledMkldnn() && one_dnn().has_value();
  if (!ours) return at::linear(x, weight, bias).contiguous();
  return one_dnn()->call(x, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

Tensor mm_kernel(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), "mm: ", a.sizes(), " and ", b.sizes(),
              " must be [M, K] and [K, N]");
  return linear_kernel(a, b.t(), std::nullopt);
}

}  // namespace

TORCH_LIBRARY_IMPL(rlneuron, CPU, m) {
  m.impl("linear", &linear_kernel);
  m.impl("mm", &mm_kernel);
}
