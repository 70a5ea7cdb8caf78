// Codes of groups of 32 numbers, as kernels/number_format.py defines them.
#pragma once

#include "attention.h"

namespace {

using namespace paged_kv;

constexpr float LARGEST_F16 = 65504.f;
constexpr float LEAST = 1.17549435e-38f;  // the smallest float of full precision

// The number of largest magnitude, and the first where two are.
INLINE float largest_of(const float* x) {
  vec above = load(x), below = sub(zero(), load(x));
  for (int i = W; i < GROUP; i += W) {
    above = max(load(x + i), above);
    below = max(sub(zero(), load(x + i)), below);
  }
  float high = reduce_max(above), low = reduce_max(below);
  if (high != low) return high > low ? high : -low;
  int i = 0;
  while (i < GROUP - 1 && fabsf(x[i]) != high) i++;
  return x[i];
}

// 0 for a group of nothing that float16 could hold, whose codes are all 0.
INLINE float inverse_of(float scale) { return fabsf(scale) < LEAST ? 0.f : 1.f / scale; }

// floor(x * factor + shift), between low and high.
INLINE vec code_of(vec x, float factor, float shift, float low, float high) {
  vec code = floor(add(mul(x, set1(factor)), set1(shift)));
  return min(max(code, set1(low)), set1(high));
}

// Puts the codes of a group at `to`, and returns its scale: by FORMAT.
template <int FORMAT>
float quantise(const float* x, uint8_t* to);

template <>
inline float quantise<PAGED_KV_Q8>(const float* x, uint8_t* to) {
  float codes[GROUP], scale = fabsf(largest_of(x)) / 127.f;
  float inverse = inverse_of(scale);
  for (int i = 0; i < GROUP; i += W)
    store(codes + i, code_of(load(x + i), inverse, 0.5f, -127.f, 127.f));
  for (int i = 0; i < GROUP; i++) to[i] = (uint8_t)(int)codes[i];
  return scale;
}

// The scale is refitted to the codes by least squares.
template <>
inline float quantise<PAGED_KV_Q4>(const float* x, uint8_t* to) {
  float codes[GROUP], inverse = inverse_of(largest_of(x) / -8.f);
  vec squares = zero(), products = zero();
  for (int i = 0; i < GROUP; i += W) {
    vec number = load(x + i), code = sub(code_of(number, inverse, 8.5f, 0.f, 15.f), set1(8.f));
    squares = fma(code, code, squares);
    products = fma(code, number, products);
    store(codes + i, code);
  }
  for (int i = 0; i < GROUP / 2; i++)
    to[i] = (uint8_t)((int)codes[i] + 8 + (((int)codes[i + GROUP / 2] + 8) << 4));
  return reduce_add(products) * inverse_of(reduce_add(squares));
}

}  // namespace
