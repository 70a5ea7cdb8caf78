// What the instruction sets' kernels and the code that plans their work share.
//
// The kernels are compiled once for each instruction set. They call no inline function of the
// standard library: the linker keeps one copy of those, and it may be the one for a better machine.
#pragma once

#include <stddef.h>

#include "paged_kv_cpu.h"

namespace paged_kv {

constexpr int PAGE_SIZE = 256;
constexpr int LANES = 16;  // the widest vector; buffers of floats are padded to it
constexpr float LOG2_E = 1.44269504088896340736f;

// Logits are kept in base 2. A hidden one is NEVER, and a running maximum starts at LOWEST: the
// difference of the two is so far below zero that the weight is exactly 0.
constexpr float NEVER = -1e30f;
constexpr float LOWEST = -1e29f;

static inline int padded(int count) { return (count + LANES - 1) / LANES * LANES; }

constexpr int GROUP = 32;  // numbers whose codes lie together
constexpr int RUN_TOKENS = 32, RUNS_OF_PAGE = PAGE_SIZE / RUN_TOKENS;  // chosen together, with a summary
constexpr int CENTRE_PARTS = 4;  // sums of tokens whose sum is a page's centre
constexpr int LONGEST_HEAD = 576;
constexpr int MOST_ROWS = 256;  // query rows of a task of several blocks

constexpr bool is_quantised(int format) { return format >= PAGED_KV_Q8; }

// Numbers that share a scale, as a power of 2: the most that divide the head size.
constexpr int scale_shift(int format, int dim) {
  int most = format == PAGED_KV_Q8 ? 5 : format == PAGED_KV_Q4 ? 6 : 7, divisor = __builtin_ctz(dim);
  return divisor < most ? divisor : most;
}

// Words of 16 bits of a token's fifth bits, and of those and its scales.
constexpr int fifth_words(int format, int dim) { return format == PAGED_KV_Q5 ? dim / 16 : 0; }
constexpr int scale_words(int format, int dim) {
  return is_quantised(format) ? fifth_words(format, dim) + (dim >> scale_shift(format, dim)) : 0;
}

// Keys or values of a run of tokens. Token t is at data + t * stride bytes, and the float16 scales of
// its groups, in formats that have them, follow those of the token before. Codes of 5 bits have their
// fifth bits before the token's scales, and are of what rows differ by from the centre of their page,
// float16 [dim].
struct RowRun {
  char* data;
  ptrdiff_t stride;
  int format;
  char* scales;
  char* centre = nullptr;

  bool is_rotated() const { return is_quantised(format); }
};

// Positions [0, count) of a run lie in one page, or in unwritten keys and values.
struct KeyRun {
  RowRun keys, values;
  int count;
  bool in_page;
};

// One call, decoded. In latent attention keys are latents, values are position keys, and a head's key
// is both, one behind the other; what is summed are the latents.
struct Attention {
  const PagedKvPages* pages;
  const PagedKvMetadata* metadata;
  const PagedKvTensor *queries, *outputs, *new_k, *new_v;
  const PagedKvTensor* position_queries;  // or null, if attention is not latent
  int k_dim, v_dim;  // numbers of a query, and of an output
  int q_format;
  int steps;      // tokens of the step, S
  int gqa_group_size;      // query heads to a KV head
  float scale;    // of base-2 logits
  bool causal;
  int window;     // 0: none
  float softcap;  // of base-2 logits; 0: none
  int new_tokens;
  // Runs that each row and KV head reads, int32 [batch, kv_heads, run_count], or null. The first is below
  // zero where a row is read whole. Positions and lengths of other rows count what is read of them.
  const int32_t* runs;
  int run_count;
  const float* sinks;  // [q_heads] base-2 logits, or null
};

// The attention of consecutive queries of one row by the query heads of one KV head. Query row r of
// a block is query r / gqa_group_size, head r % gqa_group_size.
struct QueryBlock {
  int row, kv_head;
  int step;         // the first query's place in the step
  int position;     // and in its row
  int queries;
  int key_begin, key_end;  // what at least one query sees
  int first_row;    // its first query row among those of its task
};

// Softmax over a part of the keys, unfinished: per query row the maximum, the sum of weights and
// the weighted values, padded(v_dim) floats a row.
struct SplitPartial {
  float *maximum, *sum, *values;
};

// Blocks [first, first + count) of a task attend to keys [begin, end). Where there are several, these
// lie in whole pages that all of them share, and each of their queries sees all of it.
struct Span {
  int first, count, begin, end;
};

// Blocks of one KV head that attend to a part of their keys. The spans of each block ascend.
struct Task {
  const QueryBlock* blocks;
  const Span* spans;
  int block_count, span_count;
  SplitPartial part;  // of all query rows of the blocks
  bool few;           // whether `attend_few` takes them
};

struct Kernels {
  const char* name;
  int block_rows;  // query rows of a block for `attend_many`
  size_t (*few_scratch)(const Attention&, int query_rows);
  size_t (*many_scratch)(const Attention&, int query_rows);
  // Both attend as a task says; they return the bytes of pages that they read.
  int64_t (*attend_few)(const Attention&, const Task&, float* scratch);
  int64_t (*attend_many)(const Attention&, const Task&, float* scratch);
  // Merges the parts of a block and writes its outputs.
  void (*finish)(const Attention&, const QueryBlock&, const SplitPartial* parts, int count, float* scratch);
  // Scores of the runs of pages [first, end) of a row, for each query head of a KV head, to scores
  // [heads, stride]: base-2 logarithms of the mean weight that their tokens are expected to have.
  void (*score_runs)(const Attention&, int row, int kv_head, int first, int end, float* scores, int stride);
  // The sum over query heads of the softmax of `count` scores each, [heads, stride], which are written over.
  void (*weigh_runs)(float* scores, int heads, int stride, int count, float* weights);
  // Summaries of a page's keys, float16 [8, 2 * dim].
  void (*summarise)(const RowRun& keys, int dim, char* summaries);
  // The rows of a page, of `dim` numbers in whole groups, from one format to another.
  void (*recode)(const RowRun& from, const RowRun& to, int dim);
};

// The run of tokens that begins at a position of a row and ends before `end`.
KeyRun key_run(const Attention&, const QueryBlock&, int position, int end);
// The summaries of a head's keys in a page of a row.
char* summaries_of(const Attention&, int row, int page, int kv_head);

extern const Kernels avx512_kernels, avx512_bf16_kernels, avx2_kernels, neon_kernels, generic_kernels;

}  // namespace paged_kv
