// The products of a few query rows with rows of floats.
#pragma once

#include "fetch.h"
#include "row_loaders.h"

namespace {

// scores[g * SCORES + t] of G query rows [G, q_stride] with `count` keys.
template <int FORMAT, int G>
void multiply_row_keys(const RowRun& keys, int count, int dim, const float* q, int q_stride,
                       float* scores, const Next& next) {
  typedef Loader<FORMAT> L;
  // A few query rows wait for memory, and gain nothing by more.
  constexpr int ALL = G < 5 ? ACCUMULATORS : SCORE_ACCUMULATORS, R = ALL / G;
  Fetch fetch(next, (count + R - 1) / R);
  alignas(64) float sums[ALL];
  for (int t = 0; t < count; t += R) {
    vec acc[ALL];
#pragma GCC unroll 32
    for (int i = 0; i < ALL; i++) acc[i] = zero();
    typename L::Row rows[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) rows[r] = L::at(keys, smaller(t + r, count - 1));
    fetch.step();
    auto step = [&](auto half, int d) __attribute__((always_inline)) {
      vec k[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) k[r] = L::template load<decltype(half)::value>(rows[r], d);
#pragma GCC unroll 16
      for (int g = 0; g < G; g++) {
        vec x = load(q + g * q_stride + d);
        keep_in_register(x);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[g * R + r] = fma(k[r], x, acc[g * R + r]);
      }
    };
    int d = 0;
    for (; d + W <= dim; d += W) step(Constant<false>(), d);
    if (d < dim) step(Constant<true>(), d);
    sum_lanes<ALL>(acc, sums);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) memcpy(scores + g * SCORES + t, sums + g * R, R * sizeof(float));
  }
}

// N vectors, from number d on, of the sums over `count` values, weighted for each of G query rows.
template <int FORMAT, int G, int N, bool HALF>
INLINE void multiply_row_values_at(int d, const RowRun& values, int count, const float* weights,
                                   const float* rescale, float* out, int stride, Fetch& fetch) {
  typedef Loader<FORMAT> L;
  vec acc[G][N];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++)
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) {
      acc[g][j] = load(out + g * stride + d + j * W);
      if (rescale) acc[g][j] = mul(set1(rescale[g]), acc[g][j]);
    }
  for (int t = 0; t < count; t++) {
    typename L::Row row = L::at(values, t);
    fetch.step();
    vec x[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) x[j] = L::template load<HALF>(row, d + j * W);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      vec weight = set1(weights[g * SCORES + t]);
#pragma GCC unroll 16
      for (int j = 0; j < N; j++) acc[g][j] = fma(weight, x[j], acc[g][j]);
    }
  }
#pragma GCC unroll 16
  for (int g = 0; g < G; g++)
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) store(out + g * stride + d + j * W, acc[g][j]);
}

// out [G, stride] becomes rescale[g] * out + weights @ values. So many tokens at a time that their
// rows stay in the first-level cache while one group of vectors after the other is summed. Groups of
// N and of N - 1 divide the vectors evenly: 3 + 3 + 3 + 3 + 2 + 2, for a weight is loaded once for a
// group.
template <int FORMAT, int G>
void multiply_row_values(const RowRun& values, int count, int dim, const float* weights,
                         const float* rescale, float* out, int stride, const Next& next) {
  constexpr int N = smaller(8, ACCUMULATORS / G), LESS = larger(1, N - 1);
  int vectors = dim / W, passes = (vectors + N - 1) / N;
  int wide = larger(0, vectors - LESS * passes);
  Fetch fetch(next, count * passes);
  for (int t = 0; t < count; t += VALUE_TOKENS) {
    int tokens = smaller(VALUE_TOKENS, count - t), d = 0;
    RowRun run = values;
    run.data += t * values.stride;
    for (; d < wide * N * W; d += N * W)
      multiply_row_values_at<FORMAT, G, N, false>(d, run, tokens, weights + t, rescale, out, stride,
                                                  fetch);
    for (; d + LESS * W <= dim; d += LESS * W)
      multiply_row_values_at<FORMAT, G, LESS, false>(d, run, tokens, weights + t, rescale, out, stride,
                                                     fetch);
    for (; d + W <= dim; d += W)
      multiply_row_values_at<FORMAT, G, 1, false>(d, run, tokens, weights + t, rescale, out, stride,
                                                  fetch);
    if (d < dim)
      multiply_row_values_at<FORMAT, G, 1, true>(d, run, tokens, weights + t, rescale, out, stride,
                                                 fetch);
    rescale = nullptr;
  }
}

}  // namespace
