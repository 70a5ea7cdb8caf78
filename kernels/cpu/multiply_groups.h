// The products of a few query rows with quantised keys, which never leave the registers as floats.
#pragma once

#include "arranged_queries.h"
#include "fetch.h"

namespace {

// Scales [count, groups] as floats.
INLINE void read_scales(const RowRun& run, int count, int groups, float* to) {
  const uint16_t* from = (const uint16_t*)run.scales;
  int i = 0;
  for (; i + W <= count * groups; i += W) store(to + i, load_f16<false>(from + i));
  for (; i < count * groups; i++) to[i] = float_of_f16(from[i]);
}

// scores[g * SCORES + t] of G arranged query rows [G, QUERY_FLOATS] with `count` keys.
template <int FORMAT, int G>
void multiply_group_keys(const RowRun& keys, int count, int dim, const float* q, float* scales,
                         float* scores, const Next& next) {
  typedef Codes<FORMAT> C;
  // Rows that share the loads of queries.
  constexpr int R = clamped((ACCUMULATORS - 2) / (G + 1), 1, 4);
  int groups = dim / GROUP, row_words = groups * C::WORDS;
  read_scales(keys, count, groups, scales);
  Fetch fetch(next, (count + R - 1) / R);
  alignas(64) float sums[ACCUMULATORS];
  for (int t = 0; t < count; t += R) {
    vec total[ACCUMULATORS];
#pragma GCC unroll 16
    for (int i = 0; i < ACCUMULATORS; i++) total[i] = zero();
    const char* row[R];
    const float* scale[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      int token = smaller(t + r, count - 1);
      row[r] = keys.data + token * keys.stride;
      scale[r] = scales + token * groups;
    }
    fetch.step();
    auto step = [&](auto part, int word) __attribute__((always_inline)) {
      constexpr bool PART = decltype(part)::value;
      const float* x = q + word * (OPERANDS + 1);
      int group = word / C::WORDS;
      words codes[R];
      typename C::Sum acc[G * R];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        codes[r] = C::without_sign(PART ? load_words(row[r] + word * 4, row_words - word)
                                        : load_words(row[r] + word * 4));
#pragma GCC unroll 16
      for (int g = 0; g < G; g++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[g * R + r] = C::begin(x + g * QUERY_FLOATS);
#pragma GCC unroll 16
      for (int i = 0; i < OPERANDS; i++) {
        decltype(C::operand(codes[0], i)) k[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) k[r] = C::operand(codes[r], i);
#pragma GCC unroll 16
        for (int g = 0; g < G; g++) {
          auto y = C::query(x + g * QUERY_FLOATS + (i + 1) * W);
          keep_in_register(y);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) acc[g * R + r] = C::multiplied(k[r], y, acc[g * R + r]);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        vec by = spread<C::WORDS>(scale[r] + group, PART ? groups - group : W);
#pragma GCC unroll 16
        for (int g = 0; g < G; g++)
          total[g * R + r] = fma(C::total(acc[g * R + r]), by, total[g * R + r]);
      }
    };
    int word = 0;
    if (row_words == 2 * W) {  // 128 numbers, the most frequent size, of 4 bits in 8 lanes
      step(Constant<false>(), 0);
      step(Constant<false>(), W);
    } else {
      for (; word + W <= row_words; word += W) step(Constant<false>(), word);
      if (word < row_words) step(Constant<true>(), word);
    }
    sum_lanes(total, sums);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) scores[g * SCORES + t + r] = sums[g * R + r];
  }
  for (int g = 0; g < G; g++) {
    vec scale = set1(q[(g + 1) * QUERY_FLOATS - 1]);
    for (float* x = scores + g * SCORES; x < scores + g * SCORES + count; x += W)
      store(x, mul(scale, load(x)));
  }
}

}  // namespace
