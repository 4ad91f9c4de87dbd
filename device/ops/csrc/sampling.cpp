// CPU kernel of rlneuron::sample_tokens (schema and meaning: ../sampling.py).
//
// Temperature only: one pass for the maximum and one for exponentials with partial sums, then a walk to the draw.
// With top-k, top-p, min-p, a penalty or banned tokens a row is copied and filtered first. Nothing of the size of the
// logits is allocated per call: the scratch rows belong to the thread.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "simd.h"

namespace rlneuron {
namespace {

using simd::Floats;
using simd::kLanes;

constexpr float kLow = -std::numeric_limits<float>::infinity();
// Exponentials are summed by chunks, so that a draw reads chunk sums and one chunk, not the whole row.
constexpr int64_t kChunk = 256;

struct Filters {
  const int32_t* top_k = nullptr;
  const float* top_p = nullptr;
  const float* min_p = nullptr;
  const float* penalty = nullptr;
  const bool* seen = nullptr;
  const int32_t* seen_rows = nullptr;
  const int32_t* banned = nullptr;
  int64_t banned_per_row = 0;
  bool any = false;
};

struct Scratch {
  std::vector<float> row, exponentials, sorted;
  std::vector<double> sums;
  std::vector<int32_t> order;
};

float maximum_of(const float* x, int64_t n) {
  Floats top = simd::broadcast(kLow);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) top = simd::maximum(top, simd::load(x + i));
  float best = simd::largest(top);
  for (; i < n; ++i) best = std::max(best, x[i]);
  return best;
}

// out[i] = exp((x[i] - top) * factor), 0 for -inf; chunk sums and their total in double.
double exponentials_of(const float* x, int64_t n, float top, float factor, float* out, std::vector<double>& sums) {
  sums.clear();
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = std::min(n, begin + kChunk);
    Floats part = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const Floats v = simd::load(x + i);
      Floats e = simd::exp((v - top) * factor);
      e = v == kLow ? Floats{} : e;
      simd::store(out + i, e);
      part += e;
    }
    double chunk = simd::sum(part);
    for (; i < end; ++i) {
      out[i] = x[i] == kLow ? 0.0f : std::exp((x[i] - top) * factor);
      chunk += out[i];
    }
    sums.push_back(chunk);
    total += chunk;
  }
  return total;
}

double sum_of_exponentials(const float* x, int64_t n, float top) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t end = std::min(n, begin + kChunk);
    Floats part = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) part += simd::exp(simd::load(x + i) - top);
    double chunk = simd::sum(part);
    for (; i < end; ++i) chunk += std::exp(x[i] - top);
    total += chunk;
  }
  return total;
}

// First index whose inclusive cumulative sum exceeds u * total; always one with a positive exponential.
int64_t draw(const float* e, int64_t n, const std::vector<double>& sums, double total, double u) {
  double left = u * total;
  size_t chunk = 0;
  while (chunk + 1 < sums.size() && left >= sums[chunk]) left -= sums[chunk++];
  int64_t chosen = -1;
  for (int64_t i = static_cast<int64_t>(chunk) * kChunk; i < n; ++i) {
    if (e[i] <= 0.0f) continue;
    chosen = i;
    left -= e[i];
    if (left < 0.0) return i;
  }
  if (chosen >= 0) return chosen;
  for (int64_t i = n - 1; i >= 0; --i) // rounding went past a tail of zeros
    if (e[i] > 0.0f) return i;
  TORCH_CHECK(false, "sample_tokens: a row of logits has no finite entry (NaN or all -inf)");
}

// Repetition penalty (arXiv 1909.05858, section 4.1, as in transformers) and banned tokens.
void process(const Filters& f, int64_t r, int64_t vocab, float* y) {
  if (f.penalty != nullptr && f.penalty[r] != 1.0f) {
    const bool* seen = f.seen + static_cast<int64_t>(f.seen_rows[r]) * vocab;
    for (int64_t i = 0; i < vocab; ++i)
      if (seen[i]) y[i] = y[i] < 0.0f ? y[i] * f.penalty[r] : y[i] / f.penalty[r];
  }
  for (int64_t j = 0; j < f.banned_per_row; ++j) {
    const int32_t token = f.banned[r * f.banned_per_row + j];
    if (token >= 0) y[token] = kLow;
  }
}

void keep_top_k(int64_t k, int64_t vocab, float* y, Scratch& scratch) {
  if (k <= 0 || k >= vocab) return;
  scratch.sorted.assign(y, y + vocab);
  std::nth_element(scratch.sorted.begin(), scratch.sorted.begin() + (k - 1), scratch.sorted.end(), std::greater<>());
  const float threshold = scratch.sorted[k - 1];
  for (int64_t i = 0; i < vocab; ++i)
    if (y[i] < threshold) y[i] = kLow;
}

// Keeps the most probable tokens while those before them sum to less than p (ties: lower id first).
void keep_top_p(float p, float factor, int64_t vocab, float* y, Scratch& scratch) {
  if (p >= 1.0f) return;
  const float top = maximum_of(y, vocab);
  scratch.exponentials.resize(vocab);
  float* e = scratch.exponentials.data();
  const double total = exponentials_of(y, vocab, top, factor, e, scratch.sums);
  std::vector<int32_t>& order = scratch.order;
  order.clear();
  for (int64_t i = 0; i < vocab; ++i)
    if (e[i] > 0.0f) order.push_back(static_cast<int32_t>(i));
  const auto before = [&](int32_t a, int32_t b) { return y[a] != y[b] ? y[a] > y[b] : a < b; };
  double cumulative = 0.0;
  size_t kept = 0;
  // Sorts ever larger heads: a nucleus is usually far smaller than the vocabulary.
  for (size_t head = std::min<size_t>(128, order.size());; head = std::min(head * 8, order.size())) {
    std::partial_sort(order.begin() + kept, order.begin() + head, order.end(), before);
    while (kept < head && (kept == 0 || cumulative < p * total)) cumulative += e[order[kept++]];
    if (kept < head || head == order.size()) break;
  }
  for (size_t j = kept; j < order.size(); ++j) y[order[j]] = kLow;
}

void keep_min_p(float p, float factor, int64_t vocab, float* y) {
  if (p <= 0.0f) return;
  const float top = maximum_of(y, vocab);
  const float lowest = top + std::log(p) / factor;
  for (int64_t i = 0; i < vocab; ++i)
    if (y[i] < lowest && y[i] < top) y[i] = kLow;
}

struct Draw {
  int64_t token;
  float logprob, model_logprob;
};

Draw sample_row(const float* x, int64_t vocab, float temperature, float u, const Filters& f, int64_t r,
                Scratch& scratch) {
  const float raw_top = maximum_of(x, vocab);
  const float* y = x;
  if (f.any) {
    scratch.row.assign(x, x + vocab);
    process(f, r, vocab, scratch.row.data());
    y = scratch.row.data();
  }
  const bool greedy = temperature <= 0.0f;
  const float factor = greedy ? 1.0f : 1.0f / temperature;
  if (f.any && !greedy) {
    if (f.top_k != nullptr) keep_top_k(f.top_k[r], vocab, scratch.row.data(), scratch);
    if (f.top_p != nullptr) keep_top_p(f.top_p[r], factor, vocab, scratch.row.data(), scratch);
    if (f.min_p != nullptr) keep_min_p(f.min_p[r], factor, vocab, scratch.row.data());
  }
  const float top = f.any ? maximum_of(y, vocab) : raw_top;
  scratch.exponentials.resize(vocab);
  float* e = scratch.exponentials.data();
  const double total = exponentials_of(y, vocab, top, factor, e, scratch.sums);
  TORCH_CHECK(std::isfinite(total) && total > 0.0,
              "sample_tokens: row ", r, " of the logits has NaN, +inf or no finite entry");
  const int64_t token = greedy ? std::find(y, y + vocab, top) - y : draw(e, vocab, scratch.sums, total, u);
  const float logprob = (y[token] - top) * factor - static_cast<float>(std::log(total));
  if (!f.any && factor == 1.0f) return {token, logprob, logprob};
  const double raw = sum_of_exponentials(x, vocab, raw_top);
  return {token, logprob, x[token] - raw_top - static_cast<float>(std::log(raw))};
}

template <typename T>
const T* data_or_null(const std::optional<at::Tensor>& x) {
  return x.has_value() ? x->const_data_ptr<T>() : nullptr;
}

std::tuple<at::Tensor, at::Tensor> sample_tokens(
    const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& uniforms, const at::Tensor& temperatures,
    const std::optional<at::Tensor>& top_k, const std::optional<at::Tensor>& top_p,
    const std::optional<at::Tensor>& min_p, const std::optional<at::Tensor>& penalty,
    const std::optional<at::Tensor>& seen, const std::optional<at::Tensor>& seen_rows,
    const std::optional<at::Tensor>& banned) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "sample_tokens: logits must be [N, V] with dense rows");
  const int64_t count = rows.size(0), vocab = logits.size(1);
  Filters f;
  f.top_k = data_or_null<int32_t>(top_k);
  f.top_p = data_or_null<float>(top_p);
  f.min_p = data_or_null<float>(min_p);
  f.penalty = data_or_null<float>(penalty);
  f.seen = data_or_null<bool>(seen);
  f.seen_rows = data_or_null<int32_t>(seen_rows);
  f.banned = data_or_null<int32_t>(banned);
  f.banned_per_row = banned.has_value() ? banned->size(1) : 0;
  f.any = f.top_k || f.top_p || f.min_p || f.penalty || f.banned;
  TORCH_CHECK(f.penalty == nullptr || (f.seen && f.seen_rows), "sample_tokens: a penalty needs seen and seen_rows");
  at::Tensor tokens = at::empty({count}, rows.options().dtype(at::kInt));
  at::Tensor logprobs = at::empty({2, count}, rows.options().dtype(at::kFloat));
  int32_t* token_out = tokens.mutable_data_ptr<int32_t>();
  float* logprob_out = logprobs.mutable_data_ptr<float>();
  const int32_t* row_of = rows.const_data_ptr<int32_t>();
  const float* u = uniforms.const_data_ptr<float>();
  const float* temperature = temperatures.const_data_ptr<float>();
  const auto run = [&]<typename T>(const T* base) {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      thread_local std::vector<float> converted;
      for (int64_t r = begin; r < end; ++r) {
        const T* from = base + row_of[r] * logits.stride(0);
        const float* x;
        if constexpr (std::is_same_v<T, float>) {
          x = from;
        } else {
          converted.resize(vocab);
          std::transform(from, from + vocab, converted.begin(), [](T v) { return static_cast<float>(v); });
          x = converted.data();
        }
        const Draw d = sample_row(x, vocab, temperature[r], u[r], f, r, scratch);
        token_out[r] = static_cast<int32_t>(d.token);
        logprob_out[r] = d.logprob;
        logprob_out[count + r] = d.model_logprob;
      }
    });
  };
  if (logits.scalar_type() == at::kFloat)
    run(logits.const_data_ptr<float>());
  else if (logits.scalar_type() == at::kBFloat16)
    run(logits.const_data_ptr<at::BFloat16>());
  else
    TORCH_CHECK(false, "sample_tokens: logits must be float32 or bfloat16, are ", logits.scalar_type());
  return {tokens, logprobs};
}

}  // namespace

TORCH_LIBRARY_IMPL(rlneuron, CPU, m) {
  m.impl("sample_tokens", &sample_tokens);
}

}  // namespace rlneuron
