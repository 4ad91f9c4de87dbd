// CPU kernel of rlneuron::paged_attention (schema and meaning: ../paged_attention.py).
//
// Legend: T packed tokens, H query heads, G key/value heads, g = H / G, D head size, C cached positions per block.
// Keys lie transposed in their block [D, C], so that one vector holds one dimension of 16 positions; values lie
// [C, D]. Work is cut into tiles: a tile's rows (up to kTileRows of one sequence's prefill chunk, or decode rows of
// sequences that begin with the same blocks, i.e. samples of one prompt) read their common blocks once, together.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "simd.h"

namespace rlneuron {
namespace {

using simd::Floats;
using simd::kLanes;

// Query rows (tokens times heads of one group) of a tile: enough to fill registers, few enough for scores in L2.
constexpr int64_t kTileRows = 48;
// Rows that one pass over a key or value vector serves.
constexpr int kRows = 6;
constexpr int kUnits = 4;

struct Row {
  int64_t token;    // index into T
  int64_t sequence; // row of the block table
  int64_t context;  // visible positions are [first, context)
  int64_t first;
};

struct Tile {
  std::vector<Row> rows;
  int64_t common = 0; // leading blocks that all rows share and see completely
};

struct Problem {
  int64_t heads, groups, per_group, size, block;
  int64_t query_token_stride, query_head_stride;
  float scale, softcap;
  const int32_t* tables;
  int64_t table_stride;
};

template <typename T>
struct Cache {
  const T* keys;
  const T* values;
};

// scores[r][u * 16 + lane] = sum_d q[r][d] * unit_u[d * block + lane]. `ahead` are the units of the next call (or
// these again): their lines are fetched meanwhile, since the hardware does not foresee the jump to another block.
template <int R, int U, typename T>
void dot_units(const float* q, int64_t size, const T* const* units, const T* const* ahead, int64_t block,
               float* scores, int64_t stride) {
  Floats acc[R][U] = {};
  for (int64_t d = 0; d < size; ++d) {
    Floats k[U];
    for (int u = 0; u < U; ++u) {
      k[u] = simd::load(units[u] + d * block);
      __builtin_prefetch(ahead[u] + d * block);
    }
    for (int r = 0; r < R; ++r) {
      const float x = q[r * size + d];
      for (int u = 0; u < U; ++u) acc[r][u] += x * k[u];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int u = 0; u < U; ++u) simd::store(scores + r * stride + u * kLanes, acc[r][u]);
}

template <int R, typename T>
void dot_rows(const float* q, int64_t size, const std::vector<const T*>& units, int64_t block, float* scores,
              int64_t stride) {
  const T* const* unit = units.data();
  int64_t left = static_cast<int64_t>(units.size());
  for (; left >= kUnits; left -= kUnits, unit += kUnits, scores += kUnits * kLanes)
    dot_units<R, kUnits>(q, size, unit, left >= 2 * kUnits ? unit + kUnits : unit, block, scores, stride);
  switch (left) {
    case 3: return dot_units<R, 3>(q, size, unit, unit, block, scores, stride);
    case 2: return dot_units<R, 2>(q, size, unit, unit, block, scores, stride);
    case 1: return dot_units<R, 1>(q, size, unit, unit, block, scores, stride);
    default: return;
  }
}

template <typename T>
void dot(const float* q, int64_t rows, int64_t size, const std::vector<const T*>& units, int64_t block, float* scores,
         int64_t stride) {
  for (; rows >= kRows; rows -= kRows, q += kRows * size, scores += kRows * stride)
    dot_rows<kRows>(q, size, units, block, scores, stride);
  switch (rows) {
    case 5: return dot_rows<5>(q, size, units, block, scores, stride);
    case 4: return dot_rows<4>(q, size, units, block, scores, stride);
    case 3: return dot_rows<3>(q, size, units, block, scores, stride);
    case 2: return dot_rows<2>(q, size, units, block, scores, stride);
    case 1: return dot_rows<1>(q, size, units, block, scores, stride);
    default: return;
  }
}

// A run of consecutive positions inside one block of values.
template <typename T>
struct Span {
  const T* values; // first position's row of D
  int64_t start;   // its index in the score row
  int64_t count;
};

// out[r][d..] += sum_t p[r][t] * v[t][d..] over all spans, N vectors of D at a time. Positions are dealt out to
// kStreams sums: with few rows one sum per vector would wait for its own last addition.
template <int R, int N, bool kPartial, typename T>
void mix_rows(const float* p, int64_t stride, const std::vector<Span<T>>& spans, int64_t size, int64_t d,
              float* out) {
  constexpr int kStreams = R * N <= 2 ? 8 : R * N <= 4 ? 4 : R * N <= 8 ? 2 : 1;
  Floats acc[kStreams][R][N] = {};
  const auto add = [&](const Span<T>& span, int64_t t, Floats (&to)[R][N]) __attribute__((always_inline)) {
    const T* row = span.values + t * size + d;
    Floats v[N];
    for (int n = 0; n < N; ++n)
      v[n] = kPartial ? simd::load_first(row, size - d) : simd::load(row + n * kLanes);
    for (int r = 0; r < R; ++r) {
      const float x = p[r * stride + span.start + t];
      for (int n = 0; n < N; ++n) to[r][n] += x * v[n];
    }
  };
  for (size_t i = 0; i < spans.size(); ++i) {
    const Span<T>& span = spans[i];
    const T* ahead = spans[std::min(i + 1, spans.size() - 1)].values + d;
    int64_t t = 0;
    for (; t + kStreams <= span.count; t += kStreams)
      for (int k = 0; k < kStreams; ++k) {
        for (int n = 0; n < N; ++n) __builtin_prefetch(ahead + (t + k) * size + n * kLanes);
        add(span, t + k, acc[k]);
      }
    for (; t < span.count; ++t) add(span, t, acc[0]);
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      float* to = out + r * size + d + n * kLanes;
      Floats total = kPartial ? simd::load_first(to, size - d) : simd::load(to);
      for (int k = 0; k < kStreams; ++k) total += acc[k][r][n];
      if (kPartial)
        std::memcpy(to, &total, (size - d) * sizeof(float));
      else
        simd::store(to, total);
    }
}

template <int R, typename T>
void mix_columns(const float* p, int64_t stride, const std::vector<Span<T>>& spans, int64_t size, float* out) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= size; d += 4 * kLanes) mix_rows<R, 4, false>(p, stride, spans, size, d, out);
  for (; d + 2 * kLanes <= size; d += 2 * kLanes) mix_rows<R, 2, false>(p, stride, spans, size, d, out);
  for (; d + kLanes <= size; d += kLanes) mix_rows<R, 1, false>(p, stride, spans, size, d, out);
  if (d < size) mix_rows<R, 1, true>(p, stride, spans, size, d, out);
}

template <typename T>
void mix(const float* p, int64_t rows, int64_t stride, const std::vector<Span<T>>& spans, int64_t size, float* out) {
  for (; rows >= kRows; rows -= kRows, p += kRows * stride, out += kRows * size)
    mix_columns<kRows>(p, stride, spans, size, out);
  switch (rows) {
    case 5: return mix_columns<5>(p, stride, spans, size, out);
    case 4: return mix_columns<4>(p, stride, spans, size, out);
    case 3: return mix_columns<3>(p, stride, spans, size, out);
    case 2: return mix_columns<2>(p, stride, spans, size, out);
    case 1: return mix_columns<1>(p, stride, spans, size, out);
    default: return;
  }
}

// Unnormalised softmax of scores[begin, end) in place; returns the sum. Other positions of [0, padded) become 0.
float softmax(float* scores, int64_t begin, int64_t end, int64_t padded, float softcap) {
  constexpr float kLow = -std::numeric_limits<float>::infinity();
  std::fill(scores, scores + begin, kLow);
  std::fill(scores + end, scores + padded, kLow);
  if (softcap > 0.0f)
    for (int64_t t = begin; t < end; ++t) scores[t] = softcap * std::tanh(scores[t] / softcap);
  Floats top = simd::broadcast(kLow);
  for (int64_t t = 0; t < padded; t += kLanes) top = simd::maximum(top, simd::load(scores + t));
  const float highest = simd::largest(top);
  Floats total = {};
  for (int64_t t = 0; t < padded; t += kLanes) {
    const Floats e = simd::exp(simd::load(scores + t) - highest);
    simd::store(scores + t, e);
    total += e;
  }
  // exp() of a masked score is the smallest normal number: no weight in the sum, but 0 keeps stale NaN values out.
  std::fill(scores, scores + begin, 0.0f);
  std::fill(scores + end, scores + padded, 0.0f);
  return simd::sum(total);
}

struct Scratch {
  std::vector<float> queries, scores, outputs, sums;
};

template <typename T>
void attend_tile(const Problem& s, const Tile& tile, int64_t group, const T* query, Cache<T> cache, T* output,
                 Scratch& scratch) {
  const int64_t g = s.per_group, D = s.size, C = s.block;
  const int64_t rows = static_cast<int64_t>(tile.rows.size());
  const int64_t block_stride = s.groups * D * C;
  const T* keys = cache.keys + group * D * C;
  const T* values = cache.values + group * D * C;
  int64_t first = tile.rows[0].first, longest = 0;
  for (const Row& row : tile.rows) {
    first = std::min(first, row.first);
    longest = std::max(longest, row.context);
  }
  const int64_t start = first / C; // blocks before it are outside every row's window
  const int64_t common = std::max(tile.common, start);
  const int64_t stride = ((longest + C - 1) / C - start) * C;
  scratch.queries.resize(rows * g * D);
  scratch.scores.resize(rows * g * stride);
  scratch.outputs.assign(rows * g * D, 0.0f);
  scratch.sums.resize(rows * g);

  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < g; ++h) {
      const T* from = query + tile.rows[r].token * s.query_token_stride + (group * g + h) * s.query_head_stride;
      float* to = scratch.queries.data() + (r * g + h) * D;
      for (int64_t d = 0; d < D; ++d) to[d] = static_cast<float>(from[d]) * s.scale;
    }

  std::vector<const T*> units;
  std::vector<Span<T>> spans;
  const auto units_of = [&](const int32_t* table, int64_t from, int64_t to) {
    units.clear();
    for (int64_t b = from; b < to; ++b)
      for (int64_t lane = 0; lane < C; lane += kLanes) units.push_back(keys + table[b] * block_stride + lane);
  };
  const auto spans_of = [&](const int32_t* table, int64_t from, int64_t end_position) {
    spans.clear();
    for (int64_t b = from; b * C < end_position; ++b)
      spans.push_back({values + table[b] * block_stride, (b - start) * C, std::min(C, end_position - b * C)});
  };

  const int32_t* shared_table = s.tables + tile.rows[0].sequence * s.table_stride;
  if (common > start) {
    units_of(shared_table, start, common);
    dot(scratch.queries.data(), rows * g, D, units, C, scratch.scores.data(), stride);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const Row& row = tile.rows[r];
    units_of(s.tables + row.sequence * s.table_stride, common, (row.context + C - 1) / C);
    float* scores = scratch.scores.data() + r * g * stride;
    dot(scratch.queries.data() + r * g * D, g, D, units, C, scores + (common - start) * C, stride);
    const int64_t padded = ((row.context + C - 1) / C - start) * C;
    for (int64_t h = 0; h < g; ++h)
      scratch.sums[r * g + h] = softmax(scores + h * stride, std::max<int64_t>(row.first - start * C, 0),
                                        row.context - start * C, padded, s.softcap);
  }
  if (common > start) {
    spans_of(shared_table, start, common * C);
    mix(scratch.scores.data(), rows * g, stride, spans, D, scratch.outputs.data());
  }
  for (int64_t r = 0; r < rows; ++r) {
    const Row& row = tile.rows[r];
    spans_of(s.tables + row.sequence * s.table_stride, common, row.context);
    mix(scratch.scores.data() + r * g * stride, g, stride, spans, D, scratch.outputs.data() + r * g * D);
    for (int64_t h = 0; h < g; ++h) {
      const float inverse = 1.0f / scratch.sums[r * g + h];
      const float* from = scratch.outputs.data() + (r * g + h) * D;
      T* to = output + (row.token * s.heads + group * g + h) * D;
      for (int64_t d = 0; d < D; ++d) to[d] = static_cast<T>(from[d] * inverse);
    }
  }
}

int64_t common_blocks(const int32_t* a, const int32_t* b, int64_t limit) {
  int64_t n = 0;
  while (n < limit && a[n] == b[n]) ++n;
  return n;
}

// Packs decode rows that begin with the same blocks, and chunks of prefill rows, into tiles.
std::vector<Tile> make_tiles(const Problem& s, const int32_t* starts, const int32_t* contexts, int64_t sequences,
                             int64_t window) {
  const int64_t limit = std::max<int64_t>(1, kTileRows / s.per_group);
  std::vector<Tile> tiles;
  bool open = false; // whether the last tile holds decode rows and may grow
  for (int64_t q = 0; q < sequences; ++q) {
    const int64_t count = starts[q + 1] - starts[q];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t context = contexts[q] - count + i + 1;
      const Row row{starts[q] + i, q, context, window > 0 ? std::max<int64_t>(0, context - window) : 0};
      Tile* last = tiles.empty() ? nullptr : &tiles.back();
      const bool full = last == nullptr || static_cast<int64_t>(last->rows.size()) >= limit;
      if (count > 1) { // prefill: rows of one sequence see the same blocks up to the first row's end
        if (i == 0 || full) {
          tiles.push_back({{row}, context / s.block});
        } else {
          last->rows.push_back(row);
        }
        open = false;
        continue;
      }
      int64_t common = 0;
      if (open && !full) {
        const Row& lead = last->rows[0];
        common = common_blocks(s.tables + lead.sequence * s.table_stride, s.tables + q * s.table_stride,
                               std::min(context, lead.context) / s.block);
        if (last->rows.size() > 1 && common < last->common) common = 0;
      }
      if (common > 0) {
        last->common = last->rows.size() == 1 ? common : last->common;
        last->rows.push_back(row);
      } else {
        tiles.push_back({{row}, 0});
      }
      open = true;
    }
  }
  return tiles;
}

template <typename T>
void append(const Problem& s, const at::Tensor& key, const at::Tensor& value, const int32_t* slots, T* keys,
            T* values) {
  const int64_t D = s.size, C = s.block;
  const T* k = key.const_data_ptr<T>();
  const T* v = value.const_data_ptr<T>();
  for (int64_t t = 0; t < key.size(2); ++t) {
    const int64_t block = slots[t] / C, offset = slots[t] % C;
    for (int64_t group = 0; group < s.groups; ++group) {
      const T* from = k + t * key.stride(2) + group * key.stride(1);
      T* to = keys + (block * s.groups + group) * D * C + offset;
      for (int64_t d = 0; d < D; ++d) to[d * C] = from[d];
      std::memcpy(static_cast<void*>(values + ((block * s.groups + group) * C + offset) * D),
                  v + t * value.stride(2) + group * value.stride(1), D * sizeof(T));
    }
  }
}

at::Tensor dense_last(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}

at::Tensor paged_attention(const at::Tensor& query_, const at::Tensor& key_, const at::Tensor& value_,
                           at::Tensor& key_cache, at::Tensor& value_cache, const at::Tensor& slots,
                           const at::Tensor& tables, const at::Tensor& starts, const at::Tensor& contexts,
                           double scale, int64_t window, double softcap) {
  const at::Tensor query = dense_last(query_), key = dense_last(key_), value = dense_last(value_);
  TORCH_CHECK(key_cache.is_contiguous() && value_cache.is_contiguous(), "paged_attention: caches must be contiguous");
  TORCH_CHECK(slots.scalar_type() == at::kInt && tables.scalar_type() == at::kInt && tables.stride(1) == 1,
              "paged_attention: slot_mapping and block_tables must be int32 with dense rows");
  TORCH_CHECK(query.scalar_type() == key_cache.scalar_type() && key.scalar_type() == key_cache.scalar_type() &&
                  value.scalar_type() == key_cache.scalar_type(),
              "paged_attention: query, key, value and caches must have one dtype");
  Problem s{};
  s.heads = query.size(1);
  s.groups = key_cache.size(1);
  s.per_group = s.heads / s.groups;
  s.size = key_cache.size(2);
  s.block = key_cache.size(3);
  TORCH_CHECK(s.block % kLanes == 0, "paged_attention: block_size must be a multiple of 16, is ", s.block);
  s.query_token_stride = query.stride(2);
  s.query_head_stride = query.stride(1);
  s.scale = static_cast<float>(scale);
  s.softcap = static_cast<float>(softcap);
  s.tables = tables.const_data_ptr<int32_t>();
  s.table_stride = tables.stride(0);
  at::Tensor output = at::empty({1, query.size(2), s.heads, s.size}, query.options());
  const std::vector<Tile> tiles = make_tiles(s, starts.const_data_ptr<int32_t>(), contexts.const_data_ptr<int32_t>(),
                                             contexts.size(0), window);
  const auto run = [&]<typename T>(T*) {
    append<T>(s, key, value, slots.const_data_ptr<int32_t>(), key_cache.mutable_data_ptr<T>(),
              value_cache.mutable_data_ptr<T>());
    const Cache<T> cache{key_cache.const_data_ptr<T>(), value_cache.const_data_ptr<T>()};
    const int64_t work = static_cast<int64_t>(tiles.size()) * s.groups;
    at::parallel_for(0, work, 1, [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      for (int64_t i = begin; i < end; ++i)
        attend_tile<T>(s, tiles[i / s.groups], i % s.groups, query.const_data_ptr<T>(), cache,
                       output.mutable_data_ptr<T>(), scratch);
    });
  };
  if (query.scalar_type() == at::kFloat)
    run(static_cast<float*>(nullptr));
  else if (query.scalar_type() == at::kBFloat16)
    run(static_cast<at::BFloat16*>(nullptr));
  else
    TORCH_CHECK(false, "paged_attention: dtype must be float32 or bfloat16, is ", query.scalar_type());
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(rlneuron, CPU, m) {
  m.impl("paged_attention", &paged_attention);
}

}  // namespace rlneuron
