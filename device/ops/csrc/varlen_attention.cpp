// CPU kernels of rlneuron::varlen_attention and its backward (schema: device/ops/varlen_attention.py).
// Per segment and head, blocks of query rows against all keys they may see: scores of a block are one GEMM per part
// (prefix, own), then softmax in place, then GEMMs with the values. Prompts and completions are hundreds of tokens, so
// a block's scores stay in the L2 cache and no online softmax is needed.
// Thread-safe: forward threads own (segment, head) pairs; backward threads own key/value heads, since the segments of
// a group add into the same prefix gradients.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "simd.h"

// The BLAS that torch itself brings (MKL or OpenBLAS), by its Fortran name; at::native::cpublas::gemm is not exported.
extern "C" void sgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                       const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                       const float* beta, float* c, const int* ldc);

namespace {

using at::Tensor;
namespace simd = rlneuron::simd;
using simd::Floats;
using simd::kLanes;

constexpr int64_t kBlock = 64;  // query rows per block; measured best of 32, 64, 128 at lengths 64..256

struct Segment {
  int64_t start, length, prefix_start, prefix_length;
};

std::vector<Segment> read_segments(const Tensor& segments, int64_t num_tokens) {
  TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 4 && segments.scalar_type() == at::kInt,
              "varlen_attention: segments must be int32 [S, 4]");
  const auto view = segments.contiguous();
  const int32_t* data = view.const_data_ptr<int32_t>();
  std::vector<Segment> result;
  for (int64_t s = 0; s < view.size(0); ++s) {
    const Segment seg{data[4 * s], data[4 * s + 1], data[4 * s + 2], data[4 * s + 3]};
    TORCH_CHECK(seg.start >= 0 && seg.length >= 0 && seg.start + seg.length <= num_tokens && seg.prefix_start >= 0 &&
                    seg.prefix_length >= 0 && seg.prefix_start + seg.prefix_length <= num_tokens,
                "varlen_attention: segment ", s, " lies outside the ", num_tokens, " packed tokens");
    result.push_back(seg);
  }
  return result;
}

// C = alpha * A B + beta * C for row-major matrices: A is [m, k], or [k, m] when `transpose_a`; B likewise. BLAS is
// column-major, so the operands change places.
void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a, int64_t lda,
          const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  const int mi = static_cast<int>(m), ni = static_cast<int>(n), ki = static_cast<int>(k);
  const int lda_i = static_cast<int>(lda), ldb_i = static_cast<int>(ldb), ldc_i = static_cast<int>(ldc);
  sgemm_(transpose_b ? "T" : "N", transpose_a ? "T" : "N", &ni, &mi, &ki, &alpha, b, &ldb_i, a, &lda_i, &beta, c,
         &ldc_i);
}

int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Softmax over the first `visible` entries of a row that is round_up(width) long; the rest becomes 0. Returns the
// log-sum-exp.
float softmax_row(float* row, int64_t visible, int64_t width) {
  const int64_t padded = round_up(visible);
  std::fill(row + visible, row + padded, -std::numeric_limits<float>::infinity());
  Floats top_lanes = simd::load(row);
  for (int64_t i = kLanes; i < padded; i += kLanes) top_lanes = simd::maximum(top_lanes, simd::load(row + i));
  const float top = simd::largest(top_lanes);
  Floats sum_lanes = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats e = simd::exp(simd::load(row + i) - top);
    sum_lanes += e;
    simd::store(row + i, e);
  }
  const float sum = simd::sum(sum_lanes), factor = 1.f / sum;
  for (int64_t i = 0; i < padded; i += kLanes) simd::store(row + i, simd::load(row + i) * factor);
  std::fill(row + visible, row + round_up(width), 0.f);
  return top + std::log(sum);
}

struct Shape {
  int64_t tokens, heads, kv_heads, dim;
  int64_t q_stride() const { return heads * dim; }
  int64_t kv_stride() const { return kv_heads * dim; }
};

// Scaled scores of query rows [first, first + rows) of `seg` into scores[rows, round_up(width)];
// returns width = prefix + own.
int64_t block_scores(const Shape& s, const Segment& seg, int64_t first, int64_t rows, const float* q, const float* k,
                     float scale, float* scores) {
  const int64_t own = first + rows, width = seg.prefix_length + own, stride = round_up(width);
  const float* q_block = q + (seg.start + first) * s.q_stride();
  if (seg.prefix_length > 0) {
    gemm(false, true, rows, seg.prefix_length, s.dim, scale, q_block, s.q_stride(), k + seg.prefix_start * s.kv_stride(),
            s.kv_stride(), 0.f, scores, stride);
  }
  gemm(false, true, rows, own, s.dim, scale, q_block, s.q_stride(), k + seg.start * s.kv_stride(), s.kv_stride(), 0.f,
          scores + seg.prefix_length, stride);
  return width;
}

void forward_head(const Shape& s, const Segment& seg, const float* q, const float* k, const float* v, float scale,
                  float* out, float* lse, std::vector<float>& scratch) {
  scratch.resize(kBlock * round_up(seg.prefix_length + seg.length));
  for (int64_t first = 0; first < seg.length; first += kBlock) {
    const int64_t rows = std::min(kBlock, seg.length - first);
    float* scores = scratch.data();
    const int64_t width = block_scores(s, seg, first, rows, q, k, scale, scores);
    const int64_t stride = round_up(width);
    for (int64_t r = 0; r < rows; ++r) {
      lse[(seg.start + first + r) * s.heads] = softmax_row(scores + r * stride, seg.prefix_length + first + r + 1, width);
    }
    float* out_block = out + (seg.start + first) * s.q_stride();
    if (seg.prefix_length > 0) {
      gemm(false, false, rows, s.dim, seg.prefix_length, 1.f, scores, stride, v + seg.prefix_start * s.kv_stride(), s.kv_stride(),
              0.f, out_block, s.q_stride());
    }
    gemm(false, false, rows, s.dim, first + rows, 1.f, scores + seg.prefix_length, stride, v + seg.start * s.kv_stride(),
            s.kv_stride(), seg.prefix_length > 0 ? 1.f : 0.f, out_block, s.q_stride());
  }
}

struct Grads {
  const float *grad, *out, *lse;
  float *dq, *dk, *dv;
};

// Adds the gradients of one segment and query head; pointers are shifted to the head, lse has stride `heads`.
void backward_head(const Shape& s, const Segment& seg, const float* q, const float* k, const float* v, float scale,
                   const Grads& g, std::vector<float>& scratch) {
  const int64_t longest = round_up(seg.prefix_length + seg.length);
  scratch.resize(2 * kBlock * longest);
  float *p = scratch.data(), *dp = scratch.data() + kBlock * longest;
  for (int64_t first = 0; first < seg.length; first += kBlock) {
    const int64_t rows = std::min(kBlock, seg.length - first), own = first + rows;
    const int64_t width = block_scores(s, seg, first, rows, q, k, scale, p);
    const int64_t at_block = (seg.start + first) * s.q_stride();
    const float* grad_block = g.grad + at_block;
    block_scores(s, seg, first, rows, g.grad, v, 1.f, dp);
    const int64_t stride = round_up(width);
    for (int64_t r = 0; r < rows; ++r) {
      float *p_row = p + r * stride, *dp_row = dp + r * stride;
      const int64_t visible = seg.prefix_length + first + r + 1;
      const float* grad_row = grad_block + r * s.q_stride();
      const float* out_row = g.out + at_block + r * s.q_stride();
      float delta = 0.f;
      for (int64_t d = 0; d < s.dim; ++d) delta += grad_row[d] * out_row[d];
      const float shift = g.lse[(seg.start + first + r) * s.heads];
      for (int64_t i = 0; i < visible; i += kLanes) {
        const Floats e = simd::exp(simd::load(p_row + i) - shift);
        simd::store(p_row + i, e);
        simd::store(dp_row + i, e * (simd::load(dp_row + i) - delta) * scale);
      }
      std::fill(p_row + visible, p_row + stride, 0.f);
      std::fill(dp_row + visible, dp_row + stride, 0.f);
    }
    const float* q_block = q + at_block;
    const auto part = [&](int64_t start, int64_t keys, int64_t column, float beta) {
      const int64_t at_keys = start * s.kv_stride();
      gemm(false, false, rows, s.dim, keys, 1.f, dp + column, stride, k + at_keys, s.kv_stride(), beta, g.dq + at_block,
              s.q_stride());
      gemm(true, false, keys, s.dim, rows, 1.f, dp + column, stride, q_block, s.q_stride(), 1.f, g.dk + at_keys, s.kv_stride());
      gemm(true, false, keys, s.dim, rows, 1.f, p + column, stride, grad_block, s.q_stride(), 1.f, g.dv + at_keys, s.kv_stride());
    };
    if (seg.prefix_length > 0) part(seg.prefix_start, seg.prefix_length, 0, 0.f);
    part(seg.start, own, seg.prefix_length, seg.prefix_length > 0 ? 1.f : 0.f);
  }
}

Shape check(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
                  q.size(2) == k.size(2) && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
              "varlen_attention: q ", q.sizes(), ", k ", k.sizes(), " and v ", v.sizes(),
              " must be [T, H, D], [T, K, D] and [T, K, D] with H a multiple of K");
  return {q.size(0), q.size(1), k.size(1), q.size(2)};
}

Tensor as_float(const Tensor& x) { return x.to(at::kFloat).contiguous(); }

std::tuple<Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& segments,
                                   double scale) {
  const Shape s = check(q_in, k_in, v_in);
  const auto list = read_segments(segments, s.tokens);
  const Tensor q = as_float(q_in), k = as_float(k_in), v = as_float(v_in);
  Tensor out = at::zeros_like(q), lse = at::zeros({s.tokens, s.heads}, q.options());
  const float *qp = q.const_data_ptr<float>(), *kp = k.const_data_ptr<float>(), *vp = v.const_data_ptr<float>();
  float *op = out.mutable_data_ptr<float>(), *lp = lse.mutable_data_ptr<float>();
  const int64_t group = s.heads / s.kv_heads, items = static_cast<int64_t>(list.size()) * s.heads;
  at::parallel_for(0, items, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % s.heads, q_at = head * s.dim, kv_at = head / group * s.dim;
      forward_head(s, list[i / s.heads], qp + q_at, kp + kv_at, vp + kv_at, static_cast<float>(scale), op + q_at,
                   lp + head, scratch);
    }
  });
  return {out.to(q_in.scalar_type()), lse};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_in, const Tensor& q_in, const Tensor& k_in,
                                            const Tensor& v_in, const Tensor& out_in, const Tensor& lse_in,
                                            const Tensor& segments, double scale) {
  const Shape s = check(q_in, k_in, v_in);
  const auto list = read_segments(segments, s.tokens);
  const Tensor grad = as_float(grad_in), out = as_float(out_in), lse = as_float(lse_in);
  const Tensor q = as_float(q_in), k = as_float(k_in), v = as_float(v_in);
  Tensor dq = at::zeros_like(q), dk = at::zeros_like(k), dv = at::zeros_like(v);
  const float *qp = q.const_data_ptr<float>(), *kp = k.const_data_ptr<float>(), *vp = v.const_data_ptr<float>();
  const float *gp = grad.const_data_ptr<float>(), *op = out.const_data_ptr<float>(), *lp = lse.const_data_ptr<float>();
  float *dqp = dq.mutable_data_ptr<float>(), *dkp = dk.mutable_data_ptr<float>(), *dvp = dv.mutable_data_ptr<float>();
  const int64_t group = s.heads / s.kv_heads;
  at::parallel_for(0, s.kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t kv = begin; kv < end; ++kv) {
      for (const Segment& seg : list) {
        for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
          const int64_t q_at = head * s.dim, kv_at = kv * s.dim;
          const Grads g{gp + q_at, op + q_at, lp + head, dqp + q_at, dkp + kv_at, dvp + kv_at};
          backward_head(s, seg, qp + q_at, kp + kv_at, vp + kv_at, static_cast<float>(scale), g, scratch);
        }
      }
    }
  });
  return {dq.to(q_in.scalar_type()), dk.to(k_in.scalar_type()), dv.to(v_in.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_IMPL(rlneuron, CPU, m) {
  m.impl("varlen_attention", &forward);
  m.impl("varlen_attention_backward", &backward);
}
