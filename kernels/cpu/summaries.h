// Summaries of a page's keys, and what they say about the weight of its tokens: kernels/pages/page_format.py.
#pragma once

#include "attend_few.h"

namespace {

constexpr float LOG2_OF_RUN = 5.f;
static_assert(RUN_TOKENS == 1 << 5);

// In the plain basis: pages are summarised before they are quantised.
void summarise(const RowRun& keys, int dim, char* summaries) {
  alignas(64) float mean[LONGEST_HEAD + LANES], variance[LONGEST_HEAD + LANES], row[LONGEST_HEAD + LANES];
  vec share = set1(1.f / RUN_TOKENS), most = set1(LARGEST_F16);
  for (int first = 0; first < PAGE_SIZE; first += RUN_TOKENS, summaries += 2 * dim * sizeof(uint16_t)) {
    for (int d = 0; d < dim; d += W) store(mean + d, zero()), store(variance + d, zero());
    for (int t = first; t < first + RUN_TOKENS; t++) {
      READ_ROW[keys.format](keys, t, dim, 1.f, row);
      for (int d = 0; d < dim; d += W) store(mean + d, fma(load(row + d), share, load(mean + d)));
    }
    for (int t = first; t < first + RUN_TOKENS; t++) {
      READ_ROW[keys.format](keys, t, dim, 1.f, row);
      for (int d = 0; d < dim; d += W) {
        vec away = sub(load(row + d), load(mean + d));
        store(variance + d, fma(mul(away, away), share, load(variance + d)));
      }
    }
    for (int d = 0; d < dim; d += W) {
      store(mean + d, max(min(load(mean + d), most), sub(zero(), most)));
      store(variance + d, min(load(variance + d), most));
    }
    RowRun to{summaries, 0, PAGED_KV_F16, nullptr};
    WRITE_ROWS[PAGED_KV_F16](mean, 1, dim, to, 0);
    to.data += dim * sizeof(uint16_t);
    WRITE_ROWS[PAGED_KV_F16](variance, 1, dim, to, 0);
  }
}

typedef void (*ScoreRuns)(const RowRun&, int, int, const float*, int, float*, const Next&);
constexpr int F16 = PAGED_KV_F16;
constexpr ScoreRuns SCORE_OF_GROUP[] = {
    multiply_row_keys<F16, 1>, multiply_row_keys<F16, 2>, multiply_row_keys<F16, 3>, multiply_row_keys<F16, 4>,
    multiply_row_keys<F16, smaller(5, MAX_GROUP)>, multiply_row_keys<F16, smaller(6, MAX_GROUP)>,
    multiply_row_keys<F16, smaller(7, MAX_GROUP)>, multiply_row_keys<F16, MAX_GROUP>};

void score_runs(const Attention& a, int row, int kv_head, int first, int end, float* scores,
                     int stride) {
  constexpr int FLOATS = LONGEST_HEAD + LANES;
  alignas(64) float means[MAX_GROUP * FLOATS], variances[MAX_GROUP * FLOATS];
  alignas(64) float of_means[MAX_GROUP * SCORES], of_variances[MAX_GROUP * SCORES];
  QueryBlock block{row, kv_head, 0, 0, 1, 0, 0, 0};
  int dim = a.k_dim;
  for (int g = 0, rows; g < a.gqa_group_size; g += rows, scores += rows * stride) {
    rows = smaller(MAX_GROUP, a.gqa_group_size - g);
    for (int r = 0; r < rows; r++) {
      float *mean = means + r * FLOATS, *variance = variances + r * FLOATS;
      read_query(a, block, g + r, false, mean);
      // q^2 / 2 of natural logits, for base-2 logits.
      for (int d = 0; d < dim; d += W)
        store(variance + d, mul(mul(load(mean + d), load(mean + d)), set1(0.5f / LOG2_E)));
    }
    ptrdiff_t bytes = 2 * dim * sizeof(uint16_t);
    RowRun run, following{summaries_of(a, row, first, kv_head), bytes, F16, nullptr};
    for (int page = first; page < end; page++) {
      run = following;
      if (page + 1 < end) following.data = summaries_of(a, row, page + 1, kv_head);
      // Pages lie far apart: without this, a step that reads 1/16 of 128K tokens takes twice as long.
      Next next{following, page + 1 < end ? RUNS_OF_PAGE : 0, dim}, none{run, 0, dim};
      SCORE_OF_GROUP[rows - 1](run, RUNS_OF_PAGE, dim, means, FLOATS, of_means, next);
      run.data += dim * sizeof(uint16_t);
      SCORE_OF_GROUP[rows - 1](run, RUNS_OF_PAGE, dim, variances, FLOATS, of_variances, none);
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < RUNS_OF_PAGE; i++) {
          float spread = of_variances[r * SCORES + i];
          if (spread > LOG2_OF_RUN) spread = sqrtf(4.f * LOG2_OF_RUN * spread) - LOG2_OF_RUN;
          scores[r * stride + page * RUNS_OF_PAGE + i] = of_means[r * SCORES + i] + spread;
        }
    }
  }
}

void weigh_runs(float* scores, int heads, int stride, int count, float* weights) {
  int end = (count + W - 1) / W * W;
  for (int i = 0; i < end; i += W) store(weights + i, zero());
  for (int h = 0; h < heads; h++, scores += stride) {
    float maximum = LOWEST, sum = 0.f;
    online_softmax(scores, count, 0, count, &maximum, &sum);
    vec share = set1(1.f / sum);
    for (int i = 0; i < end; i += W) store(weights + i, fma(load(scores + i), share, load(weights + i)));
  }
}

}  // namespace
