// LSTM and GRU cells. ATen takes these operators for every device but the CPU, which has no kernel for them.
// The gates are in the order of torch.nn.LSTM (input, forget, cell, output) and torch.nn.GRU (reset, update, new).
#include <ATen/ATen.h>
#include <torch/library.h>

namespace neuron {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Optional& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

Tensor or_zeros(const Optional& gradient, const Tensor& like) {
  return gradient.has_value() && gradient->defined() ? *gradient : at::zeros_like(like);
}

// workspace: the four activated gates, [B, 4H].
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell, const Optional& input_bias,
    const Optional& hidden_bias) {
  const Tensor gates = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), fresh = parts[2].tanh(), out = parts[3].sigmoid();
  const Tensor next_cell = forget * cell + in * fresh;
  return {out * next_cell.tanh(), next_cell, at::cat({in, forget, fresh, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Optional& grad_hidden, const Optional& grad_cell, const Tensor& cell, const Tensor& next_cell,
    const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &fresh = parts[2], &out = parts[3];
  const Tensor squashed = next_cell.tanh();
  const Tensor grad_h = or_zeros(grad_hidden, next_cell);
  const Tensor grad_c = or_zeros(grad_cell, next_cell) + grad_h * out * (1 - squashed * squashed);
  const Tensor grad_gates = at::cat(
      {grad_c * fresh * in * (1 - in), grad_c * cell * forget * (1 - forget), grad_c * in * (1 - fresh * fresh),
       grad_h * squashed * out * (1 - out)},
      1);
  return {grad_gates, grad_c * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

// workspace: reset, update and new gate, the hidden state, and the new gate's hidden part with bias, [B, 5H].
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden, const Optional& input_bias,
    const Optional& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto past = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (input[0] + past[0]).sigmoid(), update = (input[1] + past[1]).sigmoid();
  const Tensor fresh = (input[2] + reset * past[2]).tanh();
  return {(hidden - fresh) * update + fresh, at::cat({reset, update, fresh, hidden, past[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hidden, const Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hidden = parts[3], &past = parts[4];
  const Tensor grad_new = grad_hidden * (1 - update) * (1 - fresh * fresh);
  const Tensor grad_update = grad_hidden * (hidden - fresh) * update * (1 - update);
  const Tensor grad_reset = grad_new * past * reset * (1 - reset);
  const Tensor grad_input_gates = at::cat({grad_reset, grad_update, grad_new}, 1);
  const Tensor grad_hidden_gates = at::cat({grad_reset, grad_update, grad_new * reset}, 1);
  return {
      grad_input_gates, grad_hidden_gates, grad_hidden * update, has_bias ? grad_input_gates.sum(0) : Tensor(),
      has_bias ? grad_hidden_gates.sum(0) : Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

} // namespace neuron
