// The products of a few query rows with quantised rows, whose numbers never leave the registers.
//
// Both are as fast as the multiplications with queries and weights allow, so the scales take as few
// more as can be. A register of 32-bit words of keys gives one vector of codes after the other, and
// each lane stays within a group: it is scaled once for all codes of its word. The queries lie in that
// order, and what codes have above their middle is subtracted through the sum of a lane's queries.
// The scales of values are multiplied into the weights.
#pragma once

#include "fetch.h"

namespace {

// How the codes of a row lie in its words.
template <int FORMAT>
struct Codes;

template <>
struct Codes<PAGED_KV_Q8> {
  static constexpr int PER_WORD = 4, WORDS = 8;  // of a group
  static constexpr float MIDDLE = 0.f;
  static constexpr int number(int word, int i) { return word * 4 + i; }
  INLINE vec at(words x, int i) { return signed_bytes(x, i); }
  // From byte i of a group on, numbers i and i + 16.
  INLINE void load_pair(const char* group, int i, vec& first, vec& second) {
    first = load_bytes(group + i);
    second = load_bytes(group + GROUP / 2 + i);
  }
};

template <>
struct Codes<PAGED_KV_Q4> {
  static constexpr int PER_WORD = 8, WORDS = 4;
  static constexpr float MIDDLE = 8.f;
  static constexpr int number(int word, int i) {
    return word / WORDS * GROUP + word % WORDS * 4 + i / 2 + i % 2 * (GROUP / 2);
  }
  INLINE vec at(words x, int i) { return half_bytes(x, i); }
  INLINE void load_pair(const char* group, int i, vec& first, vec& second) {
    load_half_bytes(group + i, first, second);
  }
};

// Floats of a query row that is arranged for keys of a format: for each register of words a vector
// to begin with, then a vector for each of a word's codes.
template <int FORMAT>
INLINE int arranged(int dim) {
  typedef Codes<FORMAT> C;
  return (dim / GROUP * C::WORDS + W - 1) / W * (C::PER_WORD + 1) * W;
}

template <int FORMAT>
void arrange(const float* q, int dim, float* to) {
  typedef Codes<FORMAT> C;
  for (int word = 0; word < dim / GROUP * C::WORDS; word += W, to += (C::PER_WORD + 1) * W)
    for (int lane = 0; lane < W; lane++) {
      float sum = 0.f;
      for (int i = 0; i < C::PER_WORD; i++) {
        int number = C::number(word + lane, i);
        float x = number < dim ? q[number] : 0.f;
        to[(i + 1) * W + lane] = x;
        sum += x;
      }
      to[lane] = -C::MIDDLE * sum;
    }
}

// Scales [count, groups] as floats.
INLINE void read_scales(const RowRun& run, int count, int groups, float* to) {
  const uint16_t* from = (const uint16_t*)run.scales;
  int i = 0;
  for (; i + W <= count * groups; i += W) store(to + i, load_f16<false>(from + i));
  for (; i < count * groups; i++) to[i] = float_of_f16(from[i]);
}

// scores[g * SCORES + t] of G arranged query rows [G, q_stride] with `count` keys.
template <int FORMAT, int G>
void multiply_group_keys(const RowRun& keys, int count, int dim, const float* q, int q_stride,
                         float* scales, float* scores, const Next& next) {
  typedef Codes<FORMAT> C;
  // Rows that go through together: they share the loads of queries.
  constexpr int R = clamped((ACCUMULATORS - 2) / (G + 1), 1, 4);
  int groups = dim / GROUP, row_words = groups * C::WORDS;
  read_scales(keys, count, groups, scales);
  Fetch fetch(next, (count + R - 1) / R);
  alignas(64) float sums[ACCUMULATORS];
  for (int t = 0; t < count; t += R) {
    vec total[ACCUMULATORS];
#pragma GCC unroll 16
    for (int i = 0; i < ACCUMULATORS; i++) total[i] = zero();
    fetch.step();
    const float* x = q;
    for (int word = 0; word < row_words; word += W, x += (C::PER_WORD + 1) * W) {
      words row[R];
      vec acc[G * R];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const char* at = keys.data + smaller(t + r, count - 1) * keys.stride + word * 4;
        row[r] = word + W <= row_words ? load_words(at) : load_words(at, row_words - word);
      }
#pragma GCC unroll 16
      for (int g = 0; g < G; g++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[g * R + r] = load(x + g * q_stride);
#pragma GCC unroll 16
      for (int i = 0; i < C::PER_WORD; i++) {
        vec codes[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) codes[r] = C::at(row[r], i);
#pragma GCC unroll 16
        for (int g = 0; g < G; g++) {
          vec y = load(x + g * q_stride + (i + 1) * W);
          keep_in_register(y);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) acc[g * R + r] = fma(codes[r], y, acc[g * R + r]);
        }
      }
      int group = word / C::WORDS;
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const float* of_row = scales + smaller(t + r, count - 1) * groups + group;
        vec scale = spread<C::WORDS>(of_row, groups - group);
#pragma GCC unroll 16
        for (int g = 0; g < G; g++) total[g * R + r] = fma(acc[g * R + r], scale, total[g * R + r]);
      }
    }
    sum_lanes(total, sums);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) scores[g * SCORES + t + r] = sums[g * R + r];
  }
}

// Two vectors of one group of the sums over `count` values: weights are [G, VALUE_TOKENS].
template <int FORMAT, int G>
INLINE void multiply_pair(const char* group, int i, ptrdiff_t row, int count, const float* weights,
                          const float* decay, float* out, int stride, Fetch& fetch) {
  vec first[G], second[G];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) {
    vec shrink = set1(decay ? decay[g] : 1.f);
    first[g] = mul(shrink, load(out + g * stride + i));
    second[g] = mul(shrink, load(out + g * stride + GROUP / 2 + i));
  }
  for (int t = 0; t < count; t++) {
    fetch.step();
    vec x, y;
    Codes<FORMAT>::load_pair(group + t * row, i, x, y);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      vec weight = set1(weights[g * VALUE_TOKENS + t]);
      first[g] = fma(weight, x, first[g]);
      second[g] = fma(weight, y, second[g]);
    }
  }
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) {
    store(out + g * stride + i, first[g]);
    store(out + g * stride + GROUP / 2 + i, second[g]);
  }
}

// out [G, stride] becomes decay[g] * out + weights @ values; `scales` is room for all of a run.
template <int FORMAT, int G>
void multiply_group_values(const RowRun& values, int count, int dim, float* scales,
                           const float* weights, const float* decay, float* out, int stride,
                           const Next& next) {
  int groups = dim / GROUP, bytes = (int)(values.stride / groups);
  Fetch fetch(next, count * groups * (GROUP / 2 / W));
  read_scales(values, count, groups, scales);
  for (int t = 0; t < count; t += VALUE_TOKENS) {
    int tokens = smaller(VALUE_TOKENS, count - t);
    const char* rows = values.data + t * values.stride;
    for (int group = 0; group < groups; group++) {
      alignas(64) float scaled[G * VALUE_TOKENS];
      for (int i = 0; i < tokens; i++)
        for (int g = 0; g < G; g++)
          scaled[g * VALUE_TOKENS + i] = weights[g * SCORES + t + i] * scales[(t + i) * groups + group];
      for (int i = 0; i < GROUP / 2; i += W)
        multiply_pair<FORMAT, G>(rows + group * bytes, i, values.stride, tokens, scaled, decay,
                                 out + group * GROUP, stride, fetch);
    }
    decay = nullptr;
  }
}

}  // namespace
