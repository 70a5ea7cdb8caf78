// Codes of groups of 32 numbers, as kernels/pages/number_format.py defines them.
//
// Each pass goes over all groups of a row: while one group waits for its sums and divisions, the
// machine computes the other groups.
#pragma once

#include "attention.h"

namespace {

using namespace paged_kv;

constexpr float LEAST = 1.17549435e-38f;  // the smallest float of full precision

// A number for each group of a row, and for what fills the last vector.
struct PerGroup {
  alignas(64) float at[(LONGEST_HEAD / GROUP + LANES - 1) / LANES * LANES];

  // Nothing in the lanes behind the last group.
  void pad(int groups) {
    for (int i = groups; i % W; i++) at[i] = 0.f;
  }
};

INLINE vec negative(vec x) { return sub(zero(), x); }
INLINE vec clipped(vec x, float low, float high) { return min(max(x, set1(low)), set1(high)); }

// The largest number of each group of a row, and the largest negated number.
INLINE void find_largest(const float* row, int groups, PerGroup& above, PerGroup& below) {
  for (int i = 0; i < groups; i++, row += GROUP) {
    vec high = load(row), low = negative(load(row));
#pragma GCC unroll 8
    for (int j = W; j < GROUP; j += W) {
      high = max(load(row + j), high);
      low = max(negative(load(row + j)), low);
    }
    above.at[i] = reduce_max(high);
    below.at[i] = reduce_max(low);
  }
  above.pad(groups);
  below.pad(groups);
}

// 0 for a scale far below float16's range: all codes of the group are then 0.
INLINE vec inverse_of(vec scale) {
  vec magnitude = max(scale, negative(scale));
  return between(magnitude, set1(LEAST), set1(INFINITY), div(set1(1.f), scale), zero());
}

// Puts the codes of a row at `to`, and the scales of its groups into `scales`: by FORMAT.
template <int FORMAT>
void quantise(const float* row, int groups, char* to, PerGroup& scales);

template <>
inline void quantise<PAGED_KV_Q8>(const float* row, int groups, char* to, PerGroup& scales) {
  PerGroup above, below, inverses;
  find_largest(row, groups, above, below);
  for (int i = 0; i < groups; i += W) {
    vec scale = div(max(load(above.at + i), load(below.at + i)), set1(127.f));
    store(scales.at + i, scale);
    store(inverses.at + i, inverse_of(scale));
  }
  for (int i = 0; i < groups; i++)
    for (int j = i * GROUP; j < (i + 1) * GROUP; j += W) {
      vec code = floor(add(mul(load(row + j), set1(inverses.at[i])), set1(0.5f)));
      store_bytes(to + j, clipped(code, -127.f, 127.f));
    }
}

INLINE vec q4_code(vec x, vec inverse) {
  return sub(clipped(floor(add(mul(x, inverse), set1(8.5f))), 0.f, 15.f), set1(8.f));
}

// For each group the sums of code * number and of code * code.
INLINE void sum_codes(const float* row, int groups, const PerGroup& inverses, PerGroup& products,
                      PerGroup& squares) {
  for (int i = 0; i < groups; i++, row += GROUP) {
    vec inverse = set1(inverses.at[i]), product = zero(), square = zero();
#pragma GCC unroll 8
    for (int j = 0; j < GROUP; j += W) {
      vec number = load(row + j), code = q4_code(number, inverse);
      product = fma(code, number, product);
      square = fma(code, code, square);
    }
    products.at[i] = reduce_add(product);
    squares.at[i] = reduce_add(square);
  }
  products.pad(groups);
  squares.pad(groups);
}

template <>
inline void quantise<PAGED_KV_Q4>(const float* row, int groups, char* to, PerGroup& scales) {
  PerGroup above, below, inverses, products, squares;
  find_largest(row, groups, above, below);
  for (int i = 0; i < groups; i += W) {
    vec high = load(above.at + i), low = load(below.at + i);
    vec largest = between(low, set1(-INFINITY), high, high, negative(low));
    store(inverses.at + i, inverse_of(div(largest, set1(-8.f))));
  }
  sum_codes(row, groups, inverses, products, squares);
  for (int i = 0; i < groups; i += W)
    store(scales.at + i, mul(load(products.at + i), inverse_of(load(squares.at + i))));
  for (int i = 0; i < groups; i++, row += GROUP, to += GROUP / 2) {
    vec inverse = set1(inverses.at[i]);
    for (int j = 0; j < GROUP / 2; j += W) {
      vec low = q4_code(load(row + j), inverse);
      vec high = q4_code(load(row + GROUP / 2 + j), inverse);
      store_bytes(to + j, add(fma(high, set1(16.f), low), set1(8.f * 17.f)));
    }
  }
}

}  // namespace
