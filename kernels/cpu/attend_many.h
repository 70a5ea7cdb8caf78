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
constexpr int BLOCK_ROWS = 256;

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
  }

  static size_t floats(const Attention& a, int query_rows) {
    size_t rows = panels(query_rows) * PANEL;
    return rows * (a.k_dim + 2) + TILE_TOKENS * (key_floats(a) + value_floats(a) + PANEL) + PANEL;
  }

 private:
  // Vectors of position keys begin at any multiple of 8 numbers.
  static int key_floats(const Attention& a) {
    return a.position_queries ? padded(a.v_dim + padded(a.pages->v_dim)) : padded(a.k_dim);
  }
  static int value_floats(const Attention& a) { return a.position_queries ? 0 : padded(a.v_dim); }
};

size_t many_scratch(const Attention& a, int query_rows) { return Buffers::floats(a, query_rows); }

// Which keys the queries see. Columns without one see none.
void arrange_masks(const Attention& a, const QueryBlock& block, const Buffers& to) {
  int rows = block.queries * a.gqa_group_size, length = a.metadata->context_lens[block.row];
  for (int r = 0; r < panels(rows) * PANEL; r++) {
    int position = block.position + r / a.gqa_group_size;
    to.first[r] = r < rows ? (float)first_seen(a, position) : 0.f;
    to.behind[r] = r < rows ? (float)seen_end(a, position, length) : 0.f;
  }
}

// Queries are put into columns, in the basis of keys of that run. Overwrites the tile of keys.
void arrange_queries(const Attention& a, const QueryBlock& block, const KeyRun& run, const Buffers& to) {
  int rows = block.queries * a.gqa_group_size, k_dim = a.k_dim;
  for (int r = 0; r < panels(rows) * PANEL; r++) {
    float* column = to.q + (size_t)(r / PANEL) * k_dim * PANEL + r % PANEL;
    if (r < rows) read_query(a, block, r, run.keys.rotated, to.keys);
    if (r < rows && a.position_queries)
      read_query_of(a, *a.position_queries, block, r, LOG2_E, run.values.rotated, to.keys + a.v_dim);
    for (int d = 0; d < k_dim; d++) column[d * PANEL] = r < rows ? to.keys[d] : 0.f;
  }
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

// Attention of one panel's query rows [from, from + rows) of the block to a tile of tokens.
void attend_panel(const Attention& a, const Buffers& at, const SplitPartial& part, int from, int rows,
                  int position, int count) {
  int stride = padded(a.v_dim);
  int low = (int)at.first[from], high = (int)at.behind[from + rows - 1];
  int full_low = (int)at.first[from + rows - 1], full_high = (int)at.behind[from];
  // Rows ascend by position: the first row sees the earliest keys, the last row the latest.
  int begin = larger(low - position, 0), end = smaller(high - position, count);
  if (begin >= end) return;
  int vectors = (rows + W - 1) / W, tokens = end - begin;
  multiply(tokens, vectors, at.keys + (size_t)begin * at.key_stride, at.key_stride, 1,
           at.q + (size_t)from * a.k_dim, PANEL, at.scores, PANEL, a.k_dim, nullptr);
  if (a.softcap > 0.f)
    for (int t = 0; t < tokens; t++) cap_logits(at.scores + t * PANEL, vectors * W, a.softcap);
  bool masked = full_low > position + begin || full_high < position + end;
  (masked ? online_softmax_panel<true> : online_softmax_panel<false>)(
      at.scores, tokens, vectors, position + begin, at.first + from, at.behind + from,
      part.maximum + from, part.sum + from, at.rescale);
  for (int d = 0; d < stride; d += PANEL)
    multiply(rows, smaller(TILE_VECTORS, (stride - d) / W), at.scores, 1, PANEL,
             at.values + (size_t)begin * at.value_stride + d, at.value_stride,
             part.values + (size_t)from * stride + d, stride, tokens, at.rescale);
}

void attend_many(const Attention& a, const QueryBlock& block, int begin, int end, SplitPartial part,
                 float* scratch) {
  int rows = block.queries * a.gqa_group_size, all = panels(rows) * PANEL;
  Buffers at(a, rows, scratch);
  arrange_masks(a, block, at);
  memset(at.values, 0, sizeof(float) * TILE_TOKENS * at.value_stride);
  for (int r = 0; r < all; r++) part.maximum[r] = LOWEST, part.sum[r] = 0.f;
  Sums sums(part, rows, a.v_dim);

  KeyRun run;
  int arranged = -1;
  for (int position = begin; position < end; position += run.count) {
    run = key_run(a, block, position, smaller(end, position + TILE_TOKENS));
    int basis = run.keys.rotated + 2 * run.values.rotated;
    if (basis != arranged) arrange_queries(a, block, run, at);
    arranged = basis;
    sums.set_basis(a.position_queries ? run.keys.rotated : run.values.rotated);
    for (int t = 0; t < run.count; t++) {
      READ_ROW[run.keys.format](run.keys, t, a.pages->k_dim, 1.f, at.keys + t * at.key_stride);
      READ_ROW[run.values.format](run.values, t, a.pages->v_dim, 1.f,
                                  at.page_values + t * at.value_stride);
    }
    for (int from = 0; from < rows; from += PANEL)
      attend_panel(a, at, part, from, smaller(PANEL, rows - from), position, run.count);
  }
  sums.set_basis(false);
}

}  // namespace
