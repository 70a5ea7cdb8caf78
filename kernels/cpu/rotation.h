// The rotation of quantised rows: the Hadamard transform of blocks, scaled to be orthogonal, and so
// its own inverse. kernels/rotation.py says what it is for.
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

// `size` is a power of 2 and at least GROUP.
INLINE void rotate_block(float* x, int size) {
  for (int i = 0; i < size; i += W) store(x + i, butterflies_of_lanes(load(x + i)));
  for (int h = W; h < size; h *= 2)
    for (int i = 0; i < size; i += 2 * h)
      for (int j = i; j < i + h; j += W) {
        vec a = load(x + j), b = load(x + j + h);
        store(x + j, add(a, b));
        store(x + j + h, sub(a, b));
      }
  vec scale = set1((float)(1.0 / sqrt((double)size)));
  for (int i = 0; i < size; i += W) store(x + i, mul(load(x + i), scale));
}

// Turns a row into the other basis. Blocks are of the largest power of 2 that divides the row.
void rotate(float* row, int dim) {
  int size = dim & -dim;
  for (int i = 0; i < dim; i += size) rotate_block(row + i, size);
}

}  // namespace
