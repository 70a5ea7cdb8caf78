// Attention of many query rows: matrix products, at the speed of the arithmetic units.
//
// Query rows go through in panels that fill the vectors of a register tile. Keys and values are
// turned into floats a tile of tokens at a time, once for all panels of a block. Scores are computed
// transposed, [token, query]: a panel's queries then lie side by side in a vector, so that softmax
// needs no sums across lanes, and neither product needs anything transposed.
#pragma once

#include "row_coding.h"
#include "softmax.h"
#include "sums.h"

namespace {

constexpr int PANEL = TILE_VECTORS * W;
constexpr int TILE_TOKENS = 128;

// C [R, N vectors] = rescale * C + A^T B for k in [0, depth): A is [R, a_row], or transposed.
// rescale is null where C is to be overwritten.
template <int R, int N>
void multiply_tile(const float* a, int a_row, int a_depth, const float* b, int b_stride, float* c,
                   int c_stride, int depth, const float* rescale) {
  vec acc[R][N];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++)
      acc[i][j] = rescale ? mul(set1(rescale[i]), load(c + i * c_stride + j * W)) : zero();
  for (int k = 0; k < depth; k++) {
    vec x[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) x[j] = load(b + (size_t)k * b_stride + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
      vec y = set1(a[i * a_row + (size_t)k * a_depth]);
#pragma GCC unroll 8
      for (int j = 0; j < N; j++) acc[i][j] = fma(y, x[j], acc[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) store(c + i * c_stride + j * W, acc[i][j]);
}

typedef void (*MultiplyTile)(const float*, int, int, const float*, int, float*, int, int,
                             const float*);

template <int N>
struct ForRows {
  static constexpr MultiplyTile tiles[TILE_ROWS + 1] = {
      nullptr,           multiply_tile<1, N>, multiply_tile<2, N>, multiply_tile<3, N>,
      multiply_tile<4, N>, multiply_tile<5, N>, multiply_tile<6, N>};
};

constexpr const MultiplyTile* MULTIPLY_TILE[] = {
    nullptr, ForRows<1>::tiles, ForRows<2>::tiles, ForRows<smaller(3, TILE_VECTORS)>::tiles,
    ForRows<smaller(4, TILE_VECTORS)>::tiles};

// The product of all rows, one register tile after the other; `vectors` is at most TILE_VECTORS.
INLINE void multiply(int rows, int vectors, const float* a, int a_row, int a_depth, const float* b,
                     int b_stride, float* c, int c_stride, int depth, const float* rescale) {
  for (int i = 0; i < rows; i += TILE_ROWS)
    MULTIPLY_TILE[vectors][smaller(TILE_ROWS, rows - i)](
        a + (size_t)i * a_row, a_row, a_depth, b, b_stride, c + (size_t)i * c_stride, c_stride,
        depth, rescale ? rescale + i : nullptr);
}

INLINE int panels(int count) { return (count + PANEL - 1) / PANEL; }

struct Buffers {
  float* q;       // [panels of rows, k_dim, PANEL], in the basis of the keys that were read last
  float* first;   // [rows] first key that is seen, as floats, and
  float* behind;  // [rows] the one behind the last
  float* keys;    // [TILE_TOKENS, key_stride]
  float* values;  // [TILE_TOKENS, value_stride] what is summed; latents are a part of `keys`
  float* page_values;  // where the pages' values go: to `values`, or behind the latents
  float* scores;  // [TILE_TOKENS, PANEL]
  float* rescale;   // [PANEL]
  float *maximum, *sum;  // [rows], those of columns without a query row included
  int key_stride, value_stride;

  Buffers(const Attention& a, int query_rows, float* scratch) {
    int rows = panels(query_rows) * PANEL;
    key_stride = key_floats(a);
    q = scratch;
    first = q + (size_t)rows * a.k_dim;
    behind = first + rows;
    keys = behind + rows;
    page_values = a.position_queries ? keys + a.v_dim : keys + TILE_TOKENS * key_stride;
    values = a.position_queries ? keys : page_values;
    value_stride = a.position_queries ? key_stride : padded(a.v_dim);
    scores = keys + TILE_TOKENS * (key_stride + value_floats(a));
    rescale = scores + TILE_TOKENS * PANEL;
    maximum = rescale + PANEL;
    sum = maximum + rows;
  }

  static size_t floats(const Attention& a, int query_rows) {
    size_t rows = panels(query_rows) * PANEL;
    return rows * (a.k_dim + 4) + TILE_TOKENS * (key_floats(a) + value_floats(a) + PANEL) + PANEL;
  }

 private:
  // Vectors of position keys begin at any multiple of 8 numbers.
  static int key_floats(const Attention& a) {
    return a.position_queries ? padded(a.v_dim + padded(a.pages->v_dim)) : padded(a.k_dim);
  }
  static int value_floats(const Attention& a) { return a.position_queries ? 0 : padded(a.v_dim); }
};

size_t many_scratch(const Attention& a, int query_rows) { return Buffers::floats(a, query_rows); }

// Calls `visit` with each query row of a span: its number there, its block, and its number in that.
template <class Visit>
INLINE void for_rows(const Attention& a, const Task& task, const Span& span, Visit visit) {
  int row = 0;
  for (int i = span.first; i < span.first + span.count; i++)
    for (int r = 0; r < query_rows(a, task.blocks[i]); r++, row++) visit(row, task.blocks[i], r);
}

// Which keys the queries see, and what they have summed so far. Columns without one see none.
void begin_span(const Attention& a, const Task& task, const Span& span, const SplitPartial& part,
                int rows, const Buffers& to) {
  for (int r = rows; r < panels(rows) * PANEL; r++) {
    to.first[r] = to.behind[r] = to.sum[r] = 0.f;
    to.maximum[r] = LOWEST;
  }
  for_rows(a, task, span, [&](int row, const QueryBlock& block, int r) {
    int position = block.position + r / a.gqa_group_size;
    to.first[row] = (float)first_seen(a, position);
    to.behind[row] = (float)seen_end(a, position, a.metadata->context_lens[block.row]);
  });
  memcpy(to.maximum, part.maximum, sizeof(float) * rows);
  memcpy(to.sum, part.sum, sizeof(float) * rows);
}

// Queries are put into columns, in the basis of keys of that run. Overwrites the tile of keys.
void arrange_queries(const Attention& a, const Task& task, const Span& span, const KeyRun& run,
                     int rows, const Buffers& to) {
  int k_dim = a.k_dim;
  memset(to.q, 0, sizeof(float) * panels(rows) * PANEL * k_dim);
  for_rows(a, task, span, [&](int row, const QueryBlock& block, int r) {
    float* column = to.q + (size_t)(row / PANEL) * k_dim * PANEL + row % PANEL;
    read_query(a, block, r, run.keys.is_rotated(), to.keys);
    if (a.position_queries)
      read_query_of(a, *a.position_queries, block, r, LOG2_E, run.values.is_rotated(), to.keys + a.v_dim);
    for (int d = 0; d < k_dim; d++) column[d * PANEL] = to.keys[d];
  });
}

// Softmax of a panel's scores with the `count` tokens from position `at` on.
template <bool MASKED>
void online_softmax_panel(float* scores, int count, int vectors, int at, const float* first,
                  const float* behind, float* maximum, float* sum, float* rescale) {
  for (int j = 0; j < vectors * W; j += W) {
    vec low = load(first + j), high = load(behind + j), old = load(maximum + j), top = old;
    for (int t = 0; t < count; t++) {
      vec x = load(scores + t * PANEL + j);
      if (MASKED) {
        x = between(set1((float)(at + t)), low, high, x, set1(NEVER));
        store(scores + t * PANEL + j, x);
      }
      top = max(x, top);
    }
    vec total = zero();
    for (int t = 0; t < count; t++) {
      vec weight = exp2_vec(sub(load(scores + t * PANEL + j), top));
      total = add(total, weight);
      store(scores + t * PANEL + j, weight);
    }
    vec shrink = exp2_vec(sub(old, top));
    store(maximum + j, top);
    store(sum + j, fma(load(sum + j), shrink, total));
    store(rescale + j, shrink);
  }
}

// What all query rows [from, from + rows) see, and what at least one does.
struct Seen {
  int low, high, full_low, full_high;

  Seen(const Buffers& at, int from, int rows)
      : low((int)at.first[from]), high((int)at.behind[from]), full_low(low), full_high(high) {
    for (int r = from + 1; r < from + rows; r++) {
      int first = (int)at.first[r], behind = (int)at.behind[r];
      low = smaller(low, first), full_low = larger(full_low, first);
      high = larger(high, behind), full_high = smaller(full_high, behind);
    }
  }
};

// Attention of one panel's query rows [from, from + rows) of a span to a tile of tokens; `values` are
// the weighted sums of the span's rows.
void attend_panel(const Attention& a, const Buffers& at, float* values, int from, int rows,
                  int position, int count) {
  int stride = padded(a.v_dim);
  Seen seen(at, from, rows);
  int begin = larger(seen.low - position, 0), end = smaller(seen.high - position, count);
  if (begin >= end) return;
  int vectors = (rows + W - 1) / W, tokens = end - begin;
  multiply(tokens, vectors, at.keys + (size_t)begin * at.key_stride, at.key_stride, 1,
           at.q + (size_t)from * a.k_dim, PANEL, at.scores, PANEL, a.k_dim, nullptr);
  if (a.softcap > 0.f)
    for (int t = 0; t < tokens; t++) cap_logits(at.scores + t * PANEL, vectors * W, a.softcap);
  bool masked = seen.full_low > position + begin || seen.full_high < position + end;
  (masked ? online_softmax_panel<true> : online_softmax_panel<false>)(
      at.scores, tokens, vectors, position + begin, at.first + from, at.behind + from,
      at.maximum + from, at.sum + from, at.rescale);
  for (int d = 0; d < stride; d += PANEL)
    multiply(rows, smaller(TILE_VECTORS, (stride - d) / W), at.scores, 1, PANEL,
             at.values + (size_t)begin * at.value_stride + d, at.value_stride,
             values + (size_t)from * stride + d, stride, tokens, at.rescale);
}

int64_t attend_many(const Attention& a, const Task& task, float* scratch) {
  Buffers at(a, query_rows(a, task.blocks, task.block_count), scratch);
  memset(at.values, 0, sizeof(float) * TILE_TOKENS * at.value_stride);
  Sums sums(a, task);
  int64_t bytes = 0;
  for (int s = 0; s < task.span_count; s++) {
    const Span& span = task.spans[s];
    const QueryBlock* blocks = task.blocks + span.first;
    SplitPartial part = sums.of(span);
    int rows = query_rows(a, blocks, span.count), arranged = -1;
    begin_span(a, task, span, part, rows, at);
    KeyRun run;
    for (int position = span.begin; position < span.end; position += run.count) {
      run = key_run(a, *blocks, position, smaller(span.end, position + TILE_TOKENS));
      bytes += page_bytes(run, a.pages->k_dim, a.pages->v_dim);
      int basis = run.keys.is_rotated() + 2 * run.values.is_rotated();
      if (basis != arranged) arrange_queries(a, task, span, run, rows, at);
      arranged = basis;
      sums.set_basis(span, a.position_queries ? run.keys.is_rotated() : run.values.is_rotated());
      for (int t = 0; t < run.count; t++) {
        READ_ROW[run.keys.format](run.keys, t, a.pages->k_dim, 1.f, at.keys + t * at.key_stride);
        READ_ROW[run.values.format](run.values, t, a.pages->v_dim, 1.f,
                                    at.page_values + t * at.value_stride);
      }
      for (int from = 0; from < rows; from += PANEL)
        attend_panel(a, at, part.values, from, smaller(PANEL, rows - from), position, run.count);
    }
    memcpy(part.maximum, at.maximum, sizeof(float) * rows);
    memcpy(part.sum, at.sum, sizeof(float) * rows);
  }
  sums.set_plain_basis();
  return bytes;
}

}  // namespace
