// Attention of a few query rows: reading keys and values is what takes the time.
//
// Each row of keys or values is read from memory once for all query rows, those of other sequences that
// share its page among them. A page's keys of one head fit the second-level cache, so a second group of
// query rows reads them from there. A query row's sums are the same in every company. While keys are
// multiplied the page's values are fetched, and the next page's keys while values are.
#pragma once

#include "bf16_pairs.h"
#include "byte_keys.h"
#include "multiply_groups.h"
#include "multiply_rows.h"
#include "row_coding.h"
#include "softmax.h"
#include "sums.h"

namespace {

// How keys and values are multiplied: by the number of their format, or one of these.
constexpr int Q5_IN_BYTES = FORMATS, BF16_IN_PAIRS = FORMATS + 1;
// Queries are also multiplied with the centres of keys.
constexpr int CENTRES = FORMATS + 2, ALL_PRODUCTS = FORMATS + 3;

bool in_pairs(const Attention& a, const RowRun& run, int dim) {
  return HAS_BF16_PRODUCTS && run.format == PAGED_KV_BF16 && a.q_format == PAGED_KV_BF16 &&
         go_in_pairs(dim);
}

int value_products(const Attention& a, const RowRun& values) {
  return in_pairs(a, values, a.v_dim) ? BF16_IN_PAIRS : values.format;
}

int key_products(const Attention& a, const RowRun& keys) {
  if (in_pairs(a, keys, a.k_dim)) return BF16_IN_PAIRS;
  bool in_bytes = HAS_BYTE_PRODUCTS && keys.format == PAGED_KV_Q5 && a.q_format != PAGED_KV_F32;
  return in_bytes ? Q5_IN_BYTES : keys.format;
}

template <int PRODUCTS, int G>
void multiply_keys(const RowRun& keys, int count, int dim, const float* q, float* scales,
                   float* scores, const Next& next) {
  if constexpr (PRODUCTS == BF16_IN_PAIRS)
    multiply_paired_keys<G>(keys, count, dim, q, scores, next);
  else if constexpr (PRODUCTS == Q5_IN_BYTES)
    multiply_byte_keys<G>(keys, count, dim, q, scales, scores, next);
  else if constexpr (is_quantised(PRODUCTS))
    multiply_group_keys<PRODUCTS, G>(keys, count, dim, q, scales, scores, next);
  else
    multiply_row_keys<PRODUCTS, G>(keys, count, dim, q, QUERY_FLOATS, scores, next);
}

template <int PRODUCTS, int G>
void multiply_values(const RowRun& values, int count, int dim, float* scales, float* weights,
                     const float* rescale, float* out, int stride, const Next& next) {
  if constexpr (PRODUCTS == BF16_IN_PAIRS)
    multiply_paired_values<G>(values, count, dim, weights, rescale, out, stride, next);
  else if constexpr (is_quantised(PRODUCTS))
    multiply_group_values<PRODUCTS, G>(values, count, dim, scales, weights, rescale, out, stride, next);
  else
    multiply_row_values<PRODUCTS, G>(values, count, dim, weights, rescale, out, stride, next);
}

typedef void (*MultiplyKeys)(const RowRun&, int, int, const float*, float*, float*, const Next&);
typedef void (*MultiplyValues)(const RowRun&, int, int, float*, float*, const float*, float*, int,
                               const Next&);

template <int PRODUCTS>
struct ForGroup {
  static constexpr MultiplyKeys keys[] = {
      multiply_keys<PRODUCTS, 1>, multiply_keys<PRODUCTS, 2>, multiply_keys<PRODUCTS, 3>,
      multiply_keys<PRODUCTS, 4>, multiply_keys<PRODUCTS, smaller(5, MAX_GROUP)>,
      multiply_keys<PRODUCTS, smaller(6, MAX_GROUP)>, multiply_keys<PRODUCTS, smaller(7, MAX_GROUP)>,
      multiply_keys<PRODUCTS, MAX_GROUP>};
  static constexpr MultiplyValues values[] = {
      multiply_values<PRODUCTS, 1>, multiply_values<PRODUCTS, 2>, multiply_values<PRODUCTS, 3>,
      multiply_values<PRODUCTS, 4>, multiply_values<PRODUCTS, smaller(5, MAX_GROUP)>,
      multiply_values<PRODUCTS, smaller(6, MAX_GROUP)>,
      multiply_values<PRODUCTS, smaller(7, MAX_GROUP)>, multiply_values<PRODUCTS, MAX_GROUP>};
};

constexpr const MultiplyKeys* MULTIPLY_KEYS[] = {
    ForGroup<0>::keys, ForGroup<1>::keys, ForGroup<2>::keys, ForGroup<3>::keys, nullptr, ForGroup<5>::keys,
    ForGroup<HAS_BYTE_PRODUCTS ? Q5_IN_BYTES : PAGED_KV_Q5>::keys,
    ForGroup<HAS_BF16_PRODUCTS ? BF16_IN_PAIRS : PAGED_KV_BF16>::keys};
constexpr const MultiplyValues* MULTIPLY_VALUES[] = {
    ForGroup<0>::values, ForGroup<1>::values, ForGroup<2>::values, ForGroup<3>::values,
    ForGroup<4>::values, nullptr, nullptr,
    ForGroup<HAS_BF16_PRODUCTS ? BF16_IN_PAIRS : PAGED_KV_BF16>::values};

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

// The queries of a task, [rows, QUERY_FLOATS], arranged on demand for each kind of product, in the basis
// of what they are multiplied with.
class Queries {
 public:
  Queries(const Attention& a, const Task& task, float* memory)
      : a_(a), task_(task), rows_(query_rows(a, task.blocks, task.block_count)), memory_(memory) {}

  static size_t floats(int rows) { return (size_t)(ALL_PRODUCTS * rows + 1) * QUERY_FLOATS; }

  const float* for_products(int products) {
    float* q = memory_ + (size_t)products * rows_ * QUERY_FLOATS;
    if (!made_[products]) make(q, products);
    made_[products] = true;
    return q;
  }

 private:
  const Attention& a_;
  const Task& task_;
  int rows_;
  float* memory_;
  bool made_[ALL_PRODUCTS] = {};

  void make(float* to, int products) {
    int dim = a_.k_dim;
    bool is_arranged = is_quantised(products) && products != CENTRES;
    float* row = memory_ + (size_t)ALL_PRODUCTS * rows_ * QUERY_FLOATS;
    for (int i = 0; i < task_.block_count; i++)
      for (int r = 0; r < query_rows(a_, task_.blocks[i]); r++, to += QUERY_FLOATS) {
        if (products == BF16_IN_PAIRS) {
          read_query_of(a_, *a_.queries, task_.blocks[i], r, 1.f, false, row);
          arrange_pairs(row, dim, a_.scale, to);
          continue;
        }
        read_query(a_, task_.blocks[i], r, is_quantised(products), is_arranged ? row : to);
        if (products == PAGED_KV_Q8) arrange<PAGED_KV_Q8>(row, dim, to);
        if (products == PAGED_KV_Q5) arrange<PAGED_KV_Q5>(row, dim, to);
        if (products == Q5_IN_BYTES) arrange_bytes(row, dim, (ByteRow*)to);
      }
  }
};

// Adds to the scores [rows, SCORES] of `count` keys the products of query rows [rows, QUERY_FLOATS] with
// the centre of the keys' page.
void add_centre_products(const RowRun& keys, int count, int dim, const float* q, int rows, float* scores) {
  const uint16_t* centre = (const uint16_t*)keys.centre;
  for (int r = 0; r < rows; r++, q += QUERY_FLOATS, scores += SCORES) {
    vec sum = zero();
    for (int d = 0; d < dim; d += W) sum = fma(load(q + d), load_f16<false>(centre + d), sum);
    vec product = set1(reduce_add(sum));
    for (int t = 0; t < count; t += W) store(scores + t, add(load(scores + t), product));
  }
}

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
      // Memory then needs the time of a whole page: fetched later, unshared pages take 1.3 times as long.
      bool is_quick = products == BF16_IN_PAIRS;
      size_t first = (size_t)blocks->first_row * QUERY_FLOATS;
      const float* q = queries.for_products(products) + first;
      for (int i = 0; i < groups; i++) {
        int g = rows * i / groups, size = rows * (i + 1) / groups - g;
        Next next = is_quick ? share_of(following.keys, following.count, k_dim, i, groups)
                             : share_of(run.values, run.count, v_dim, i, groups);
        MULTIPLY_KEYS[products][size - 1](run.keys, run.count, k_dim, q + g * QUERY_FLOATS, scales,
                                          scores + g * SCORES, next);
      }
      if (run.keys.centre)
        add_centre_products(run.keys, run.count, k_dim, queries.for_products(CENTRES) + first, rows, scores);
      weigh(a, task, span, run, at, part, scores, rescale);
      sums.set_basis(span, run.values.is_rotated());
      for (int i = 0; i < groups; i++) {
        int g = rows * i / groups, size = rows * (i + 1) / groups - g;
        Next next = is_quick ? share_of(following.values, following.count, v_dim, i, groups)
                             : share_of(following.keys, following.count, k_dim, i, groups);
        MULTIPLY_VALUES[value_products(a, run.values)][size - 1](run.values, run.count, v_dim, scales,
                                                     scores + g * SCORES, rescale + g,
                                                     part.values + (size_t)g * stride, stride, next);
      }
    }
  }
  sums.set_plain_basis();
  return bytes;
}

}  // namespace
