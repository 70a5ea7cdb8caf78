// The rotation of quantised rows: the Hadamard transform of blocks, scaled to be orthogonal, and so
// its own inverse. number_format.py says what it is for.
//
// Sums are made in the order in which MLX makes them, so that codes are the same on all backends.
#pragma once

#include "attention.h"

namespace {

using namespace paged_kv;

// x[i] + x[i + H] in lane i, and their difference in lane i + H.
template <int H>
INLINE vec butterflies(vec x) {
  alignas(64) float signs[W];
  for (int i = 0; i < W; i++) signs[i] = i & H ? -1.f : 1.f;
  return fma(x, load(signs), swap_lanes<H>(x));
}

INLINE vec butterflies_of_lanes(vec x) {
  x = butterflies<2>(butterflies<1>(x));
  if (W > 4) x = butterflies<4>(x);
  if (W > 8) x = butterflies<8>(x);
  return x;
}

// Sums and differences of vectors h apart, then of those 2 * h apart, times `by`.
INLINE void butterflies_of_four(float* x, int h, vec by) {
  vec a = load(x), b = load(x + h), c = load(x + 2 * h), d = load(x + 3 * h);
  vec sum = add(a, b), other_sum = add(c, d), difference = sub(a, b), other_difference = sub(c, d);
  store(x, mul(by, add(sum, other_sum)));
  store(x + h, mul(by, add(difference, other_difference)));
  store(x + 2 * h, mul(by, sub(sum, other_sum)));
  store(x + 3 * h, mul(by, sub(difference, other_difference)));
}

INLINE void butterflies_of_two(float* x, int h, vec by) {
  vec a = load(x), b = load(x + h);
  store(x, mul(by, add(a, b)));
  store(x + h, mul(by, sub(a, b)));
}

// `size` is a power of 2 and at least GROUP.
INLINE void rotate_block(float* x, int size) {
  for (int i = 0; i < size; i += W) store(x + i, butterflies_of_lanes(load(x + i)));
  vec scale = set1((float)(1.0 / sqrt((double)size)));
  for (int h = W; h < size; h *= 4) {
    vec by = 4 * h < size ? set1(1.f) : scale;
    if (2 * h == size)
      for (int j = 0; j < h; j += W) butterflies_of_two(x + j, h, by);
    else
      for (int i = 0; i < size; i += 4 * h)
        for (int j = i; j < i + h; j += W) butterflies_of_four(x + j, h, by);
  }
}

// Turns a row into the other basis. Blocks are of the largest power of 2 that divides the row.
void rotate(float* row, int dim) {
  int size = dim & -dim;
  for (int i = 0; i < dim; i += size) rotate_block(row + i, size);
}

}  // namespace
