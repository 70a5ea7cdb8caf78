// Attention of a few query rows: reading keys and values is what takes the time.
//
// Each row of keys or values is read from memory once for all query rows, those of other sequences that
// share its page among them. A page's keys of one head fit the second-level cache, so a second group of
// query rows reads them from there. A query row's sums are the same in every company. While keys are
// multiplied the page's values are fetched, and the next page's keys while values are.
#pragma once

#include "byte_keys.h"
#include "multiply_groups.h"
#include "multiply_rows.h"
#include "row_coding.h"
#include "softmax.h"
#include "sums.h"

namespace {

// How keys are multiplied: by the number of their format, or this.
constexpr int Q4_IN_BYTES = FORMATS;

int key_products(const Attention& a, const RowRun& keys) {
  bool in_bytes = HAS_BYTE_PRODUCTS && keys.format == PAGED_KV_Q4 && a.q_format != PAGED_KV_F32;
  return in_bytes ? Q4_IN_BYTES : keys.format;
}

template <int PRODUCTS, int G>
void multiply_keys(const RowRun& keys, int count, int dim, const float* q, float* scales,
                   float* scores, const Next& next) {
  if constexpr (PRODUCTS == Q4_IN_BYTES)
    multiply_byte_keys<G>(keys, count, dim, q, scales, scores, next);
  else if constexpr (is_quantised(PRODUCTS))
    multiply_group_keys<PRODUCTS, G>(keys, count, dim, q, scales, scores, next);
  else
    multiply_row_keys<PRODUCTS, G>(keys, count, dim, q, QUERY_FLOATS, scores, next);
}

template <int FORMAT, int G>
void multiply_values(const RowRun& values, int count, int dim, float* scales, const float* weights,
                     const float* rescale, float* out, int stride, const Next& next) {
  if constexpr (is_quantised(FORMAT))
    multiply_group_values<FORMAT, G>(values, count, dim, scales, weights, rescale, out, stride, next);
  else
    multiply_row_values<FORMAT, G>(values, count, dim, weights, rescale, out, stride, next);
}

typedef void (*MultiplyKeys)(const RowRun&, int, int, const float*, float*, float*, const Next&);
typedef void (*MultiplyValues)(const RowRun&, int, int, float*, const float*, const float*, float*,
                               int, const Next&);

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

constexpr const MultiplyKeys* MULTIPLY_KEYS[] = {
    ForGroup<0>::keys, ForGroup<1>::keys, ForGroup<2>::keys, ForGroup<3>::keys, ForGroup<4>::keys,
    ForGroup<HAS_BYTE_PRODUCTS ? Q4_IN_BYTES : PAGED_KV_Q4>::keys};
constexpr const MultiplyValues* MULTIPLY_VALUES[FORMATS] = {
    ForGroup<0>::values, ForGroup<1>::values, ForGroup<2>::values, ForGroup<3>::values,
    ForGroup<4>::values};

// Turns the scores [from, to) of `count` into weights, the others into 0; returns the factor that
// rescales earlier weighted sums.
INLINE float online_softmax(float* scores, int count, int from, int to, float* maximum, float* sum) {
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
  float rescale = exp2f(*maximum - new_maximum);
  *maximum = new_maximum;
  *sum = *sum * rescale + reduce_add(total);
  return rescale;
}

// The queries of a task, [rows, QUERY_FLOATS], arranged on demand for each kind of product of
// `key_products` and each basis.
class Queries {
 public:
  Queries(const Attention& a, const Task& task, float* memory)
      : a_(a), task_(task), rows_(query_rows(a, task.blocks, task.block_count)), memory_(memory) {}

  static size_t floats(int rows) { return (size_t)(2 * ORDERS * rows + 1) * QUERY_FLOATS; }

  const float* for_products(int products, bool rotated) {
    int order = is_quantised(products) ? products - PAGED_KV_Q8 + 1 : 0;
    int which = 2 * order + rotated;
    float* q = memory_ + (size_t)which * rows_ * QUERY_FLOATS;
    if (!made_[which]) make(q, products, rotated);
    made_[which] = true;
    return q;
  }

 private:
  static constexpr int ORDERS = 4;  // as they are, arranged for Q8 and for Q4, and in bytes
  const Attention& a_;
  const Task& task_;
  int rows_;
  float* memory_;
  bool made_[2 * ORDERS] = {};

  void make(float* to, int products, bool rotated) {
    int dim = a_.k_dim;
    float* row = memory_ + (size_t)2 * ORDERS * rows_ * QUERY_FLOATS;
    for (int i = 0; i < task_.block_count; i++)
      for (int r = 0; r < query_rows(a_, task_.blocks[i]); r++, to += QUERY_FLOATS) {
        read_query(a_, task_.blocks[i], r, rotated, is_quantised(products) ? row : to);
        if (products == PAGED_KV_Q8) arrange<PAGED_KV_Q8>(row, dim, to);
        if (products == PAGED_KV_Q4) arrange<PAGED_KV_Q4>(row, dim, to);
        if (products == Q4_IN_BYTES) arrange_bytes(row, dim, (ByteRow*)to);
      }
  }
};

int scale_floats(const Attention& a) {
  return (PAGE_SIZE + VALUE_TOKENS) * (larger(a.k_dim, a.v_dim) / GROUP) + LANES;
}

size_t few_scratch(const Attention& a, int rows) {
  return Queries::floats(rows) + (size_t)rows * (SCORES + 1) + scale_floats(a) + 3 * LANES;
}

// Turns the scores [rows of the span, SCORES] of a run from position `at` on into weights.
void weigh(const Attention& a, const Task& task, const Span& span, const KeyRun& run, int at,
           const SplitPartial& part, float* scores, float* rescale) {
  int row = 0;
  for (int i = span.first; i < span.first + span.count; i++) {
    const QueryBlock& block = task.blocks[i];
    int length = a.metadata->context_lens[block.row];
    for (int r = 0; r < query_rows(a, block); r++, row++, scores += SCORES) {
      if (a.softcap > 0.f) cap_logits(scores, run.count, a.softcap);
      int position = block.position + r / a.gqa_group_size;
      int from = clamped(first_seen(a, position) - at, 0, run.count);
      int to = clamped(seen_end(a, position, length) - at, 0, run.count);
      rescale[row] = online_softmax(scores, run.count, from, to, part.maximum + row, part.sum + row);
    }
  }
}

int64_t attend_few(const Attention& a, const Task& task, float* scratch) {
  int all = query_rows(a, task.blocks, task.block_count), k_dim = a.k_dim, v_dim = a.v_dim;
  int stride = padded(v_dim);
  Queries queries(a, task, scratch);
  float* scores = scratch + Queries::floats(all);
  float* rescale = scores + (size_t)all * SCORES;
  float* scales = rescale + padded(all);
  Sums sums(a, task);
  int64_t bytes = 0;
  for (int s = 0; s < task.span_count; s++) {
    const Span& span = task.spans[s];
    const QueryBlock* blocks = task.blocks + span.first;
    SplitPartial part = sums.of(span);
    int rows = query_rows(a, blocks, span.count), groups = (rows + MAX_GROUP - 1) / MAX_GROUP;
    KeyRun run, following = key_run(a, *blocks, span.begin, span.end);
    for (int at = span.begin; at < span.end; at += run.count) {
      run = following;
      following.count = 0;
      if (at + run.count < span.end) following = key_run(a, *blocks, at + run.count, span.end);
      bytes += page_bytes(run, k_dim, v_dim);
      int products = key_products(a, run.keys);
      const float* q = queries.for_products(products, run.keys.rotated) +
                       (size_t)blocks->first_row * QUERY_FLOATS;
      for (int i = 0; i < groups; i++) {
        int g = rows * i / groups, size = rows * (i + 1) / groups - g;
        Next next = share_of(run.values, run.count, v_dim, i, groups);
        MULTIPLY_KEYS[products][size - 1](run.keys, run.count, k_dim, q + g * QUERY_FLOATS, scales,
                                          scores + g * SCORES, next);
      }
      weigh(a, task, span, run, at, part, scores, rescale);
      sums.set_basis(span, run.values.rotated);
      for (int i = 0; i < groups; i++) {
        int g = rows * i / groups, size = rows * (i + 1) / groups - g;
        Next next = share_of(following.keys, following.count, k_dim, i, groups);
        MULTIPLY_VALUES[run.values.format][size - 1](run.values, run.count, v_dim, scales,
                                                     scores + g * SCORES, rescale + g,
                                                     part.values + (size_t)g * stride, stride, next);
      }
    }
  }
  sums.set_plain_basis();
  return bytes;
}

}  // namespace
