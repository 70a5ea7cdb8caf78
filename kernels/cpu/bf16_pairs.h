// The products of a few query rows of bfloat16 with keys and values of bfloat16, two numbers at a time.
//
// An instruction multiplies 32 numbers with 32 others and adds the products up in twos, in float32,
// where floats go by 16. Products with keys are exact. Weights of values are rounded to bfloat16, as
// MLX's own attention does, which adds less noise than rounding outputs to it.
#pragma once

#include "multiply_groups.h"

namespace {

constexpr int PAIRED = 2 * W;  // numbers of a register

// Where a query's scale lies behind its numbers: scores are multiplied by it, so that they stay exact.
constexpr int SCALE_AT = LONGEST_HEAD / 2;

// A row's numbers go in whole registers.
INLINE bool go_in_pairs(int dim) { return dim % PAIRED == 0; }

// A query row of bfloat16 as it is, given as floats.
void arrange_pairs(const float* q, int dim, float scale, float* to) {
  uint16_t* numbers = (uint16_t*)to;
  for (int d = 0; d < dim; d++) {
    uint32_t bits;
    memcpy(&bits, q + d, sizeof bits);
    numbers[d] = (uint16_t)(bits >> 16);
  }
  to[SCALE_AT] = scale;
}

// scores[g * SCORES + t] of G query rows [G, QUERY_FLOATS] with `count` keys.
template <int G>
void multiply_paired_keys(const RowRun& keys, int count, int dim, const float* q, float* scores,
                          const Next& next);
// out [G, stride] becomes rescale[g] * out + weights @ values. Rounds the weights in place.
template <int G>
void multiply_paired_values(const RowRun& values, int count, int dim, float* weights,
                            const float* rescale, float* out, int stride, const Next& next);

#if HAS_BF16_PRODUCTS

template <int G>
void multiply_paired_keys(const RowRun& keys, int count, int dim, const float* q, float* scores,
                          const Next& next) {
  constexpr int ALL = G < 5 ? ACCUMULATORS : SCORE_ACCUMULATORS, R = ALL / G;
  Fetch fetch(next, (count + R - 1) / R);
  vec scale = set1(q[SCALE_AT]);
  alignas(64) float sums[2 * W];
  for (int t = 0; t < count; t += R) {
    vec acc[ALL];
#pragma GCC unroll 32
    for (int i = 0; i < ALL; i++) acc[i] = zero();
    const char* rows[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) rows[r] = keys.data + smaller(t + r, count - 1) * keys.stride;
    fetch.step();
    for (int d = 0; d < dim; d += PAIRED) {
      words k[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) k[r] = load_words(rows[r] + d * sizeof(uint16_t));
#pragma GCC unroll 16
      for (int g = 0; g < G; g++) {
        words x = load_words((const char*)(q + g * QUERY_FLOATS) + d * sizeof(uint16_t));
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[g * R + r] = add_paired_products(acc[g * R + r], k[r], x);
      }
    }
    sum_lanes<ALL>(acc, sums);
    store(sums, mul(scale, load(sums)));
    if (ALL > W) store(sums + W, mul(scale, load(sums + W)));
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) memcpy(scores + g * SCORES + t, sums + g * R, R * sizeof(float));
  }
}

// N times PAIRED numbers, from number d on, of the sums over `count` values: an even number, or the last.
template <int G, int N>
INLINE void multiply_paired_values_at(int d, const RowRun& values, int count, const float* weights,
                                      const float* rescale, float* out, int stride, Fetch& fetch) {
  vec low[G][N], high[G][N];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++)
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) {
      const float* at = out + g * stride + d + j * PAIRED;
      vec first = load(at), second = load(at + W);
      if (rescale) first = mul(set1(rescale[g]), first), second = mul(set1(rescale[g]), second);
      low[g][j] = low_of_pairs(first, second), high[g][j] = high_of_pairs(first, second);
    }
  const char* at = values.data + d * sizeof(uint16_t);
  for (int t = 0; t < count; t += 2, at += 2 * values.stride) {
    fetch.step();
    words first[N], second[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) {
      const char* numbers = at + j * PAIRED * sizeof(uint16_t);
      // Behind the last value there may be anything, which a weight of 0 would not hide.
      words x = load_words(numbers), y = t + 1 < count ? load_words(numbers + values.stride) : word1(0);
      first[j] = paired_low(x, y), second[j] = paired_high(x, y);
    }
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      uint32_t pair;
      memcpy(&pair, (const uint16_t*)(weights + g * SCORES) + t, sizeof pair);
      words weight = word1(pair);
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) {
        low[g][j] = add_paired_products(low[g][j], first[j], weight);
        high[g][j] = add_paired_products(high[g][j], second[j], weight);
      }
    }
  }
#pragma GCC unroll 16
  for (int g = 0; g < G; g++)
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) {
      float* to = out + g * stride + d + j * PAIRED;
      store(to, first_of_pairs(low[g][j], high[g][j]));
      store(to + W, second_of_pairs(low[g][j], high[g][j]));
    }
}

template <int G>
void multiply_paired_values(const RowRun& values, int count, int dim, float* weights,
                            const float* rescale, float* out, int stride, const Next& next) {
  for (int g = 0; g < G; g++) {
    uint16_t* rounded = (uint16_t*)(weights + g * SCORES);
    for (int t = 0; t < count; t += W) store_bf16<false>(rounded + t, load(weights + g * SCORES + t));
  }
  constexpr int N = clamped(ACCUMULATORS / (2 * G), 1, 4);
  int wide = dim / (N * PAIRED), passes = wide + dim / PAIRED - N * wide;
  Fetch fetch(next, (count + 1) / 2 * passes);
  for (int t = 0; t < count; t += VALUE_TOKENS) {
    RowRun run = values;
    run.data += t * values.stride;
    int tokens = smaller(VALUE_TOKENS, count - t), d = 0;
    for (; d + N * PAIRED <= dim; d += N * PAIRED)
      multiply_paired_values_at<G, N>(d, run, tokens, weights + t / 2, rescale, out, stride, fetch);
    for (; d < dim; d += PAIRED)
      multiply_paired_values_at<G, 1>(d, run, tokens, weights + t / 2, rescale, out, stride, fetch);
    rescale = nullptr;
  }
}

#endif

}  // namespace
