// Queries beside keys of codes, in words of 32 bits.
//
// Codes are taken as they stand, without their sign; what they have above their middle is subtracted
// from sums. Codes of 8 bits are multiplied as floats. Codes of 4 bits are multiplied in pairs with
// queries of 16 bits, whose sums are exact: what is lost is half of 1 / 32767 of the largest number
// of a query, where a number of float16 has lost up to half of 1 / 1024 of itself.
#pragma once

#include "attention.h"

namespace {

using namespace paged_kv;

constexpr float LARGEST_I16 = 32767.f;
// Codes of a row fill words, each of which has so many operands: one code, or a pair.
constexpr int OPERANDS = 4;
// At least what any arranged row takes, and behind that what its scores are to be multiplied with.
constexpr int QUERY_FLOATS = LONGEST_HEAD / 4 * (OPERANDS + 1) + LANES;

// An arranged row has, for each register of words, a vector that sums begin with, then one for each
// operand. The lanes of a register stay within a group so long, and are scaled once.
template <int FORMAT>
struct Codes;

template <>
struct Codes<PAGED_KV_Q8> {
  static constexpr int WORDS = GROUP / 4;
  typedef vec Sum;

  INLINE words without_sign(words x) { return differing(x, word1(0x80808080)); }
  // The i-th code of each word, left in its place.
  INLINE vec operand(words x, int i) {
    if (i == 3) return floats_of(shifted_right(x, 24));
    return floats_of(both(x, word1(255u << 8 * i)));
  }
  INLINE Sum begin(const float* q) { return load(q); }
  INLINE vec query(const float* q) { return load(q); }
  INLINE Sum multiplied(vec x, vec q, Sum sum) { return fma(x, q, sum); }
  INLINE vec total(Sum sum) { return sum; }
};

template <>
struct Codes<PAGED_KV_Q4> {
  static constexpr int WORDS = GROUP / 8;
  typedef words Sum;

  INLINE words without_sign(words x) { return x; }
  // Codes i and i + 4 of each word.
  INLINE words operand(words x, int i) { return both(shifted_right(x, 4 * i), word1(0x000f000f)); }
  INLINE Sum begin(const float* q) { return load_words((const char*)q); }
  INLINE words query(const float* q) { return load_words((const char*)q); }
  // Else the compiler adds products up in another order, for which it has too few registers.
  INLINE Sum multiplied(words x, words q, Sum sum) {
    sum = add_pairs(sum, x, q);
    keep_in_register(sum);
    return sum;
  }
  INLINE vec total(Sum sum) { return floats_of(sum); }
};

void arrange_for_bytes(const float* q, int dim, float* to) {
  to[QUERY_FLOATS - 1] = 1.f;
  for (int word = 0; word < dim / 4; word += W, to += (OPERANDS + 1) * W)
    for (int lane = 0; lane < W; lane++) {
      const float* x = q + 4 * (word + lane);
      bool exists = word + lane < dim / 4;
      float sum = 0.f, shrink = 1.f;  // an operand in its place is 256 times that before
      for (int i = 0; i < 4; i++, shrink /= 256.f) {
        float number = exists ? x[i] : 0.f;
        to[(i + 1) * W + lane] = i == 3 ? number : number * shrink;
        sum += number;
      }
      to[lane] = -128.f * sum;
    }
}

// Rounds a row to 16 bits; returns the scale. It is NaN where a number is, or is infinite.
INLINE float round_to_16_bits(const float* q, int dim, int16_t* to) {
  vec largest = zero(), nothing = zero();
  for (int d = 0; d < dim; d += W) {
    vec x = load(q + d);
    largest = max(max(x, sub(zero(), x)), largest);
    nothing = fma(x, zero(), nothing);
  }
  float scale = reduce_max(largest) / LARGEST_I16 + reduce_add(nothing);
  vec inverse = set1(scale > 0.f ? 1.f / scale : 0.f);
  for (int d = 0; d < dim; d += W) store_halves((char*)(to + d), mul(load(q + d), inverse));
  return scale;
}

// Byte k of a word has number k of its quarter of the group's first half, and of the second.
void arrange_for_nibbles(const float* q, int dim, float* to) {
  alignas(64) int16_t rounded[LONGEST_HEAD + LANES];
  to[QUERY_FLOATS - 1] = round_to_16_bits(q, dim, rounded);
  for (int word = 0; word < dim / 8; word += W, to += (OPERANDS + 1) * W)
    for (int lane = 0; lane < W; lane++) {
      int first = (word + lane) / 4 * GROUP + (word + lane) % 4 * 4, sum = 0;
      for (int i = 0; i < OPERANDS; i++) {
        int16_t pair[2] = {};
        const int16_t* x = rounded + first + i / 2 + i % 2 * (GROUP / 2);
        if (word + lane < dim / 8) pair[0] = x[0], pair[1] = x[2];
        memcpy(to + (i + 1) * W + lane, pair, sizeof pair);
        sum += pair[0] + pair[1];
      }
      sum *= -8;
      memcpy(to + lane, &sum, sizeof sum);
    }
}

}  // namespace
