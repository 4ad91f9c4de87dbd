// Sixteen-lane float vectors on GCC/Clang vector extensions.
//
// One 64-byte register where the machine has AVX-512, two or four smaller ones where it has not: the compiler lowers
// them, so kernels are written once. Holds loads from float32 and bfloat16, reductions and the exponential; nothing
// that knows an operator.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>

namespace rlneuron::simd {

constexpr int64_t kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

inline Floats broadcast(float x) {
  return x - Floats{};
}

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Floats load(const at::BFloat16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  const Words w = __builtin_convertvector(h, Words) << 16;
  Floats v;
  std::memcpy(&v, &w, sizeof v);
  return v;
}

// The first `count` (< 16) lanes; the others are zero.
inline Floats load_first(const float* p, int64_t count) {
  Floats v = {};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

inline Floats load_first(const at::BFloat16* p, int64_t count) {
  at::BFloat16 padded[kLanes] = {};
  std::memcpy(static_cast<void*>(padded), p, count * sizeof(at::BFloat16));
  return load(padded);
}

inline void store(float* p, Floats v) {
  std::memcpy(p, &v, sizeof v);
}

inline Floats maximum(Floats a, Floats b) {
  return a > b ? a : b;
}

inline float sum(Floats v) {
  float lanes[kLanes];
  store(lanes, v);
  float total = 0.0f;
  for (float lane : lanes) total += lane;
  return total;
}

inline float largest(Floats v) {
  float lanes[kLanes];
  store(lanes, v);
  float top = lanes[0];
  for (float lane : lanes) top = lane > top ? lane : top;
  return top;
}

// exp(x), relative error about 1e-7 (Cephes' expf: Moshier, reduced range, degree 5). Below -87.3 the smallest
// normal number comes back, not 0, and above 88 the largest finite one.
inline Floats exp(Floats x) {
  x = x < -87.3f ? broadcast(-87.3f) : x;
  x = x > 88.0f ? broadcast(88.0f) : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
  const Floats shifted = x * 1.44269504088896341f + 12582912.0f;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const Floats n = shifted - 12582912.0f;
  const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const Ints exponent = ((bits - 0x4B400000) + 127) << 23;
  Floats power;
  std::memcpy(&power, &exponent, sizeof power);
  return y * power;
}

}  // namespace rlneuron::simd
