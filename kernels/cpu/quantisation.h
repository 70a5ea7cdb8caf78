// Codes of groups of 32 numbers, as kernels/pages/number_format.py defines them. A scale may be that of
// `shared` groups.
//
// Each pass goes over all groups of a row: while one group waits for its sums and divisions, the
// machine computes the other groups.
#pragma once

#include "attention.h"

namespace {

using namespace paged_kv;

constexpr float LEAST = 1.17549435e-38f;  // the smallest float of full precision

// A number for each group of 32 of a row, and for what fills the last vector.
struct PerGroup {
  alignas(64) float at[(LONGEST_HEAD / GROUP + LANES - 1) / LANES * LANES];

  // Nothing in the lanes behind the last group.
  void pad(int groups) {
    for (int i = groups; i % W; i++) at[i] = 0.f;
  }

  // Gives groups that share a scale what `join` makes of their numbers.
  template <class Join>
  void share(int groups, int shared, Join join) {
    for (int i = 0; shared > 1 && i < groups; i += shared) {
      float all = at[i];
      for (int j = 1; j < shared; j++) all = join(all, at[i + j]);
      for (int j = 0; j < shared; j++) at[i + j] = all;
    }
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

// Puts the codes of a row at `to`, fifth bits into `fifths`, a word of each group, and the scales of
// its groups into `scales`: by FORMAT.
template <int FORMAT>
void quantise(const float* row, int groups, int shared, char* to, uint32_t* fifths, PerGroup& scales);

template <>
inline void quantise<PAGED_KV_Q8>(const float* row, int groups, int, char* to, uint32_t*, PerGroup& scales) {
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

template <int MIDDLE>
INLINE vec code_of(vec x, vec inverse) {
  return clipped(floor(add(mul(x, inverse), set1(MIDDLE + 0.5f))), 0.f, 2.f * MIDDLE - 1.f);
}

// For each group the sums of code * number and of code * code.
template <int MIDDLE>
INLINE void sum_codes(const float* row, int groups, const PerGroup& inverses, PerGroup& products,
                      PerGroup& squares) {
  for (int i = 0; i < groups; i++, row += GROUP) {
    vec inverse = set1(inverses.at[i]), product = zero(), square = zero();
#pragma GCC unroll 8
    for (int j = 0; j < GROUP; j += W) {
      vec number = load(row + j), code = sub(code_of<MIDDLE>(number, inverse), set1((float)MIDDLE));
      product = fma(code, number, product);
      square = fma(code, code, square);
    }
    products.at[i] = reduce_add(product);
    squares.at[i] = reduce_add(square);
  }
  products.pad(groups);
  squares.pad(groups);
}

// The inverses of the first scales, by which numbers become codes, and the scales that are refitted to these.
template <int MIDDLE>
INLINE void fit(const float* row, int groups, int shared, PerGroup& inverses, PerGroup& scales) {
  auto larger_of = [](float a, float b) { return a > b ? a : b; };
  auto sum_of = [](float a, float b) { return a + b; };
  PerGroup above, below, products, squares;
  find_largest(row, groups, above, below);
  above.share(groups, shared, larger_of);
  below.share(groups, shared, larger_of);
  for (int i = 0; i < groups; i += W) {
    vec high = load(above.at + i), low = load(below.at + i);
    vec largest = between(low, set1(-INFINITY), high, high, negative(low));
    store(inverses.at + i, inverse_of(div(largest, set1((float)-MIDDLE))));
  }
  sum_codes<MIDDLE>(row, groups, inverses, products, squares);
  products.share(groups, shared, sum_of);
  squares.share(groups, shared, sum_of);
  for (int i = 0; i < groups; i += W)
    store(scales.at + i, mul(load(products.at + i), inverse_of(load(squares.at + i))));
}

// A group of codes as words: the lower halves of bytes are the first 16 codes, and fifth bits are apart.
template <int MIDDLE>
INLINE void quantise_by_halves(const float* row, int groups, int shared, char* to, uint32_t* fifths,
                               PerGroup& scales) {
  PerGroup inverses;
  fit<MIDDLE>(row, groups, shared, inverses, scales);
  for (int i = 0; i < groups; i++, row += GROUP, to += GROUP / 2) {
    uint32_t codes[GROUP / 4], lower[GROUP / 8], bits = 0;
    for (int j = 0; j < GROUP; j += W)
      store_bytes((char*)codes + j, code_of<MIDDLE>(load(row + j), set1(inverses.at[i])));
    for (int j = 0; j < GROUP / 8; j++)
      lower[j] = (codes[j] & 0x0f0f0f0f) | (codes[j + GROUP / 8] & 0x0f0f0f0f) << 4;
    for (int j = 0; j < GROUP / 4; j++) bits |= (codes[j] >> 4 & 0x01010101) << j;
    memcpy(to, lower, sizeof lower);
    fifths[i] = bits;
  }
}

template <>
inline void quantise<PAGED_KV_Q4>(const float* row, int groups, int shared, char* to, uint32_t* fifths,
                                  PerGroup& scales) {
  quantise_by_halves<8>(row, groups, shared, to, fifths, scales);
}

template <>
inline void quantise<PAGED_KV_Q5>(const float* row, int groups, int shared, char* to, uint32_t* fifths,
                                  PerGroup& scales) {
  quantise_by_halves<16>(row, groups, shared, to, fifths, scales);
}

// The codes of such a group, a byte each.
INLINE void unpack_halves(const char* from, uint32_t fifths, char* to) {
  uint32_t lower[GROUP / 8], codes[GROUP / 4];
  memcpy(lower, from, sizeof lower);
  for (int j = 0; j < GROUP / 8; j++) {
    codes[j] = (lower[j] & 0x0f0f0f0f) | (fifths >> j & 0x01010101) << 4;
    codes[j + GROUP / 8] = (lower[j] >> 4 & 0x0f0f0f0f) | (fifths >> j & 0x10101010);
  }
  memcpy(to, codes, sizeof codes);
}

}  // namespace
