// Attention of a few query rows: reading keys and values is what takes the time.
//
// Each row of keys or values is read from memory once for all query rows. A page's keys of one head
// fit the second-level cache, so a second group of query rows reads them from there. While keys are
// multiplied the page's values are fetched, and the next page's keys while values are.
#pragma once

#include "row_loaders.h"

namespace {

constexpr int LINE = 64;  // bytes of a cache line
// Scores of one query row. Keys go through in steps that may end behind the last one.
constexpr int SCORES = PAGE_SIZE + LANES;
constexpr int VALUE_TOKENS = 64;

// Fetches the rows of a run into the second-level cache, spread evenly over the steps of a loop:
// all at once they would take the place of the loop's own loads.
class Fetch {
 public:
  Fetch(const RowRun* run, int count, int steps) : at_(nullptr), left_(0), step_(0) {
    if (!run || steps <= 0) return;
    at_ = run->data;
    left_ = count * run->stride;
    step_ = (left_ + steps * LINE - 1) / (steps * LINE) * LINE;
  }

  __attribute__((always_inline)) void step() {
    if (left_ <= 0) return;
    for (ptrdiff_t i = 0; i < step_; i += LINE) __builtin_prefetch(at_ + i, 0, 2);
    at_ += step_;
    left_ -= step_;
  }

 private:
  const char* at_;
  ptrdiff_t left_, step_;
};

// scores[g * SCORES + t] of G query rows [G, q_stride] with `count` keys.
template <int FORMAT, int G>
void multiply_keys(RowRun keys, int count, int dim, const float* q, int q_stride, float* scores,
                   const RowRun* next, int next_count) {
  typedef Loader<FORMAT> L;
  constexpr int R = ACCUMULATORS / G;
  Fetch fetch(next, next_count, (count + R - 1) / R);
  alignas(64) float sums[ACCUMULATORS];
  for (int t = 0; t < count; t += R) {
    vec acc[ACCUMULATORS];
#pragma GCC unroll 16
    for (int i = 0; i < ACCUMULATORS; i++) acc[i] = zero();
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
    sum_lanes(acc, sums);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) scores[g * SCORES + t + r] = sums[g * R + r];
  }
}

// N vectors, from number d on, of the sums over `count` values, weighted for each of G query rows.
template <int FORMAT, int G, int N, bool HALF>
INLINE void multiply_values_at(int d, RowRun values, int count, const float* weights,
                               const float* decay, float* out, int stride, Fetch& fetch) {
  typedef Loader<FORMAT> L;
  vec acc[G][N];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++)
#pragma GCC unroll 16
    for (int j = 0; j < N; j++) {
      acc[g][j] = load(out + g * stride + d + j * W);
      if (decay) acc[g][j] = mul(set1(decay[g]), acc[g][j]);
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

// out [G, stride] becomes decay[g] * out + weights @ values. So many tokens at a time that their
// rows stay in the first-level cache while one group of vectors after the other is summed. Groups of
// N and of N - 1 divide the vectors evenly: 3 + 3 + 3 + 3 + 2 + 2, for a weight is loaded once for a
// group.
template <int FORMAT, int G>
void multiply_values(RowRun values, int count, int dim, const float* weights, const float* decay,
                     float* out, int stride, const RowRun* next, int next_count) {
  constexpr int N = smaller(8, ACCUMULATORS / G), LESS = larger(1, N - 1);
  int vectors = dim / W, passes = (vectors + N - 1) / N;
  int wide = larger(0, vectors - LESS * passes);
  Fetch fetch(next, next_count, count * passes);
  for (int t = 0; t < count; t += VALUE_TOKENS) {
    int tokens = smaller(VALUE_TOKENS, count - t), d = 0;
    RowRun run = {values.data + t * values.stride, values.stride};
    for (; d < wide * N * W; d += N * W)
      multiply_values_at<FORMAT, G, N, false>(d, run, tokens, weights + t, decay, out, stride, fetch);
    for (; d + LESS * W <= dim; d += LESS * W)
      multiply_values_at<FORMAT, G, LESS, false>(d, run, tokens, weights + t, decay, out, stride,
                                                 fetch);
    for (; d + W <= dim; d += W)
      multiply_values_at<FORMAT, G, 1, false>(d, run, tokens, weights + t, decay, out, stride, fetch);
    if (d < dim)
      multiply_values_at<FORMAT, G, 1, true>(d, run, tokens, weights + t, decay, out, stride, fetch);
    decay = nullptr;
  }
}

typedef void (*MultiplyKeys)(RowRun, int, int, const float*, int, float*, const RowRun*, int);
typedef void (*MultiplyValues)(RowRun, int, int, const float*, const float*, float*, int,
                               const RowRun*, int);

template <int FORMAT>
struct ForGroup {
  static constexpr MultiplyKeys keys[] = {
      multiply_keys<FORMAT, 1>, multiply_keys<FORMAT, 2>, multiply_keys<FORMAT, 3>,
      multiply_keys<FORMAT, 4>, multiply_keys<FORMAT, smaller(5, MAX_GROUP)>,
      multiply_keys<FORMAT, smaller(6, MAX_GROUP)>, multiply_keys<FORMAT, smaller(7, MAX_GROUP)>,
      multiply_keys<FORMAT, MAX_GROUP>};
  static constexpr MultiplyValues values[] = {
      multiply_values<FORMAT, 1>, multiply_values<FORMAT, 2>, multiply_values<FORMAT, 3>,
      multiply_values<FORMAT, 4>, multiply_values<FORMAT, smaller(5, MAX_GROUP)>,
      multiply_values<FORMAT, smaller(6, MAX_GROUP)>,
      multiply_values<FORMAT, smaller(7, MAX_GROUP)>, multiply_values<FORMAT, MAX_GROUP>};
};

constexpr const MultiplyKeys* MULTIPLY_KEYS[FORMATS] = {
    ForGroup<0>::keys, ForGroup<1>::keys, ForGroup<2>::keys};
constexpr const MultiplyValues* MULTIPLY_VALUES[FORMATS] = {
    ForGroup<0>::values, ForGroup<1>::values, ForGroup<2>::values};

// Turns the scores [from, to) of `count` into weights, the others into 0; returns what earlier
// weighted sums are to be multiplied with.
INLINE float soften(float* scores, int count, int from, int to, float* maximum, float* sum) {
  int end = (count + W - 1) / W * W;
  for (int i = 0; i < from; i++) scores[i] = NEVER;
  for (int i = to; i < end; i++) scores[i] = NEVER;
  vec top = set1(*maximum);
  for (int i = 0; i < end; i += W) top = max(load(scores + i), top);
  float new_maximum = reduce_max(top);
  vec shift = set1(new_maximum), total = zero();
  for (int i = 0; i < end; i += W) {
    vec weight = exp2_vec(sub(load(scores + i), shift));
    total = add(total, weight);
    store(scores + i, weight);
  }
  float decay = exp2f(*maximum - new_maximum);
  *maximum = new_maximum;
  *sum = *sum * decay + reduce_add(total);
  return decay;
}

size_t few_scratch(const Attention& a, int rows) {
  return (size_t)rows * (padded(a.pages->k_dim) + SCORES + 3) + 3 * LANES;
}

void read_queries(const Attention& a, const QueryBlock& block, float* q) {
  int rows = block.queries * a.ratio, stride = padded(a.pages->k_dim);
  for (int r = 0; r < rows; r++)
    READ_ROW[a.q_format](query_row(a, block, r), a.pages->k_dim, a.scale, q + r * stride);
}

void attend_few(const Attention& a, const QueryBlock& block, int begin, int end, Partial part,
                float* scratch) {
  int rows = block.queries * a.ratio, k_dim = a.pages->k_dim, v_dim = a.pages->v_dim;
  int q_stride = padded(k_dim), stride = padded(v_dim), length = a.rows->context_lens[block.row];
  float* q = scratch;
  float* scores = q + (size_t)rows * q_stride;
  float* decay = scores + (size_t)rows * SCORES;
  read_queries(a, block, q);
  for (int r = 0; r < rows; r++) part.maximum[r] = LOWEST, part.sum[r] = 0.f;
  memset(part.values, 0, sizeof(float) * rows * stride);

  int groups = (rows + MAX_GROUP - 1) / MAX_GROUP;
  KeyRun run, next;
  if (begin < end) next = key_run(a, block, begin, end);
  for (int at = begin; at < end; at += run.count) {
    run = next;
    bool last = at + run.count >= end;
    if (!last) next = key_run(a, block, at + run.count, end);
    for (int i = 0; i < groups; i++) {
      int g = rows * i / groups, size = rows * (i + 1) / groups - g;
      MULTIPLY_KEYS[run.k_format][size - 1](run.keys, run.count, k_dim, q + g * q_stride, q_stride,
                                            scores + g * SCORES, i ? nullptr : &run.values, run.count);
    }
    for (int r = 0; r < rows; r++) {
      int position = block.position + r / a.ratio;
      int from = clamped(first_seen(a, position) - at, 0, run.count);
      int to = clamped(seen_end(a, position, length) - at, 0, run.count);
      decay[r] = soften(scores + r * SCORES, run.count, from, to, part.maximum + r, part.sum + r);
    }
    for (int i = 0; i < groups; i++) {
      int g = rows * i / groups, size = rows * (i + 1) / groups - g;
      MULTIPLY_VALUES[run.v_format][size - 1](
          run.values, run.count, v_dim, scores + g * SCORES, decay + g,
          part.values + (size_t)g * stride, stride, i || last ? nullptr : &next.keys, next.count);
    }
  }
}

}  // namespace
