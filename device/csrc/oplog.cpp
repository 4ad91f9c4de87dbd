#include "oplog.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>

namespace neuron {
namespace {

struct Entry {
  explicit Entry(std::string given) : name(std::move(given)) {}
  const std::string name;
  std::atomic<int64_t> ops{0}, flops{0}, bytes{0}, fallbacks{0};
};

std::mutex table_mutex;
constexpr int kMaxOperators = 1 << 14;
std::array<std::atomic<Entry*>, kMaxOperators> entries; // read without the lock; entries are never removed
std::atomic<int> num_entries{0};
std::atomic<bool> enabled{true};

std::map<std::string, int>& ids() {
  static auto* instance = new std::map<std::string, int>();
  return *instance;
}

void add(std::atomic<int64_t>& counter, int64_t amount) {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

const at::Tensor& tensor_at(const c10::IValue* arguments, int index) {
  return arguments[index].toTensor();
}

int64_t matmul_flops(const at::Tensor& left, const at::Tensor& right) {
  // [.., M, K] x [.., K, N]: every element of `left` meets N columns.
  return 2 * left.numel() * right.size(-1);
}

// [B, H, Lq, D] x [B, H, Lk, D] -> scores -> values: two products of 2 B H Lq Lk D each. Causal masks skip nothing,
// as in torch.utils.flop_counter.
int64_t attention_flops(const at::Tensor& query, const at::Tensor& key, int64_t products) {
  return products * 2 * query.numel() * key.size(-2);
}

// Our own attention operators skip what the mask hides, and so does their count: `products` products of 2 D for each
// query head and each position that a token sees. The values are read here, before the kernel checks them, so
// whatever it will refuse counts as nothing.
bool is_int32(const at::Tensor& tensor, int64_t dim) {
  return tensor.scalar_type() == at::kInt && tensor.dim() == dim;
}

// query [1, H, T, D]; sequence s has the tokens [starts[s], starts[s + 1]), the last of its contexts[s] positions.
int64_t paged_attention_flops(const at::Tensor& query, const at::Tensor& starts, const at::Tensor& contexts,
                              int64_t window) {
  if (query.dim() != 4 || !is_int32(starts, 1) || !is_int32(contexts, 1) || starts.size(0) != contexts.size(0) + 1) {
    return 0;
  }
  const auto start = starts.accessor<int32_t, 1>(), context = contexts.accessor<int32_t, 1>();
  int64_t seen = 0;
  for (int64_t s = 0; s < contexts.size(0); ++s) {
    const int64_t last = context[s], first = last - (start[s + 1] - start[s]) + 1;
    for (int64_t positions = first; positions <= last; ++positions) {
      seen += window > 0 ? std::min(positions, window) : positions;
    }
  }
  return 2 * 2 * query.size(1) * query.size(3) * seen;
}

// query [T, H, D]; segments [S, 4]: start, length, prefix start, prefix length (rlneuron::varlen_attention).
int64_t varlen_attention_flops(const at::Tensor& query, const at::Tensor& segments, int64_t products) {
  if (query.dim() != 3 || !is_int32(segments, 2) || segments.size(1) != 4) {
    return 0;
  }
  const auto segment = segments.accessor<int32_t, 2>();
  int64_t seen = 0;
  for (int64_t s = 0; s < segments.size(0); ++s) {
    const int64_t length = segment[s][1], prefix = segment[s][3];
    seen += length * prefix + length * (length + 1) / 2;
  }
  return products * 2 * query.size(1) * query.size(2) * seen;
}

// 2 x output elements x input channels per group x kernel elements; for a transposed convolution the input
// takes the place of the output (torch.utils.flop_counter.conv_flop_count).
int64_t convolution_flops(const at::Tensor& input, const at::Tensor& weight, const c10::IValue* geometry) {
  const bool transposed = geometry[3].toBool();
  int64_t positions = input.dim() == weight.dim() ? input.size(0) : 1;
  const auto stride = geometry[0].toIntVector(), padding = geometry[1].toIntVector(), dilation = geometry[2].toIntVector();
  const int64_t spatial = weight.dim() - 2;
  for (int64_t axis = 0; axis < spatial; ++axis) {
    const auto pick = [&](const std::vector<int64_t>& values) { return values[values.size() == 1 ? 0 : axis]; };
    const int64_t length = input.size(input.dim() - spatial + axis);
    const int64_t reach = pick(dilation) * (weight.size(2 + axis) - 1) + 1;
    positions *= transposed ? length : std::max<int64_t>(0, (length + 2 * pick(padding) - reach) / pick(stride) + 1);
  }
  return 2 * positions * weight.numel();
}

} // namespace

int op_id(const std::string& name) {
  std::lock_guard<std::mutex> lock(table_mutex);
  auto [found, fresh] = ids().try_emplace(name, num_entries.load());
  if (fresh) {
    TORCH_CHECK(found->second < kMaxOperators, "more than ", kMaxOperators, " operators");
    entries[found->second] = new Entry(name);
    num_entries = found->second + 1;
  }
  return found->second;
}

FlopsRule flops_rule(const std::string& name) {
  static const std::map<std::string, FlopsRule> rules = {
      {"aten::mm", FlopsRule::mm},
      {"aten::addmm", FlopsRule::addmm},
      {"aten::_addmm_activation", FlopsRule::addmm},
      {"aten::bmm", FlopsRule::bmm},
      {"aten::baddbmm", FlopsRule::baddbmm},
      {"aten::addbmm", FlopsRule::baddbmm},
      {"aten::mv", FlopsRule::mv},
      {"aten::addmv", FlopsRule::addmv},
      {"aten::dot", FlopsRule::dot},
      {"aten::vdot", FlopsRule::dot},
      {"aten::linear", FlopsRule::linear},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", FlopsRule::attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", FlopsRule::attention_backward},
      {"aten::convolution", FlopsRule::convolution},
      {"aten::convolution_backward", FlopsRule::convolution_backward},
      {"rlneuron::linear", FlopsRule::linear},
      {"rlneuron::mm", FlopsRule::mm},
      {"rlneuron::paged_attention", FlopsRule::paged_attention},
      {"rlneuron::varlen_attention", FlopsRule::varlen_attention},
      {"rlneuron::varlen_attention_backward", FlopsRule::varlen_attention_backward},
  };
  auto found = rules.find(name);
  if (found == rules.end() && !name.empty() && name.back() == '_') {
    found = rules.find(name.substr(0, name.size() - 1)); // addmm_
  }
  return found == rules.end() ? FlopsRule::none : found->second;
}

int64_t count_flops(FlopsRule rule, const c10::IValue* arguments) {
  switch (rule) {
    case FlopsRule::none:
      return 0;
    case FlopsRule::mm:
    case FlopsRule::bmm:
      return matmul_flops(tensor_at(arguments, 0), tensor_at(arguments, 1));
    case FlopsRule::addmm:
    case FlopsRule::baddbmm:
      return matmul_flops(tensor_at(arguments, 1), tensor_at(arguments, 2));
    case FlopsRule::mv:
    case FlopsRule::dot:
      return 2 * tensor_at(arguments, 0).numel();
    case FlopsRule::addmv:
      return 2 * tensor_at(arguments, 1).numel();
    case FlopsRule::linear:
      return 2 * tensor_at(arguments, 0).numel() * tensor_at(arguments, 1).size(0);
    case FlopsRule::attention:
      return attention_flops(tensor_at(arguments, 0), tensor_at(arguments, 1), 2);
    case FlopsRule::attention_backward: // recomputed scores, and the gradients of values, scores, queries and keys
      return attention_flops(tensor_at(arguments, 1), tensor_at(arguments, 2), 5);
    case FlopsRule::paged_attention:
      return paged_attention_flops(
          tensor_at(arguments, 0), tensor_at(arguments, 7), tensor_at(arguments, 8), arguments[10].toInt());
    case FlopsRule::varlen_attention:
      return varlen_attention_flops(tensor_at(arguments, 0), tensor_at(arguments, 3), 2);
    case FlopsRule::varlen_attention_backward: // as above
      return varlen_attention_flops(tensor_at(arguments, 1), tensor_at(arguments, 6), 5);
    case FlopsRule::convolution:
      return convolution_flops(tensor_at(arguments, 0), tensor_at(arguments, 1), arguments + 3);
    case FlopsRule::convolution_backward: {
      const auto mask = arguments[10].toBoolList();
      const int64_t once = convolution_flops(tensor_at(arguments, 1), tensor_at(arguments, 2), arguments + 4);
      return once * (int64_t(mask.get(0)) + int64_t(mask.get(1)));
    }
  }
  return 0;
}

bool log_enabled() {
  return enabled.load(std::memory_order_relaxed);
}

void log_enable(bool on) {
  enabled = on;
}

void record(int id, int64_t flops, int64_t bytes, bool fallback) {
  Entry& entry = *entries[id].load(std::memory_order_relaxed);
  add(entry.ops, 1);
  add(entry.bytes, bytes);
  if (flops != 0) {
    add(entry.flops, flops);
  }
  if (fallback) {
    add(entry.fallbacks, 1);
  }
}

void log_reset() {
  for (int id = 0; id < num_entries; ++id) {
    Entry& entry = *entries[id];
    entry.ops = entry.flops = entry.bytes = entry.fallbacks = 0;
  }
}

OpTotals log_totals() {
  OpTotals totals{0, 0, 0};
  for (int id = 0; id < num_entries; ++id) {
    const Entry& entry = *entries[id];
    totals.ops += entry.ops;
    totals.flops += entry.flops;
    totals.bytes += entry.bytes;
  }
  return totals;
}

std::vector<OpCount> log_by_operator() {
  std::vector<OpCount> counts;
  for (int id = 0; id < num_entries; ++id) {
    const Entry& entry = *entries[id];
    if (entry.ops > 0) {
      counts.push_back({entry.name, entry.ops, entry.flops, entry.bytes, entry.fallbacks});
    }
  }
  return counts;
}

} // namespace neuron
