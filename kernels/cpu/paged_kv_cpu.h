// The C interface of the CPU kernels: the only thing that Python knows of them.
//
// Arrays come as DLPack tensors, whose layout is a public standard, so that nothing here depends on
// MLX's or Python's binary interface. Pages are memory that the caller owns. Every function may be
// called from several threads at once, and keeps nothing that it was given.
#pragma once

#include <stdint.h>

#define PAGED_KV_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// https://github.com/dmlc/dlpack, version 0.8.
typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null where the array is contiguous
  uint64_t byte_offset;
} PagedKvTensor;

// How a page holds numbers: floats of the model's dtype, or rotated numbers as codes of 8, 4 or 5 bits,
// which share float16 scales. Values have no 5 bits, and keys no 4. kernels/pages/number_format.py says
// what they are.
enum { PAGED_KV_F32 = 0, PAGED_KV_F16 = 1, PAGED_KV_BF16 = 2, PAGED_KV_Q8 = 3, PAGED_KV_Q4 = 4, PAGED_KV_Q5 = 5 };

enum { PAGED_KV_OK = 0, PAGED_KV_NO_MEMORY = 1, PAGED_KV_BAD_ARRAY = 2, PAGED_KV_BAD_PAGE = 3 };

// What the bytes of a page are: keys [kv_heads, 256, row], then their scales [kv_heads, 256, scales] if the
// format has any, fifth bits before those of a token, then their centres, float16 [kv_heads, k_dim], which
// keys of 5 bits are held relative to; and values, which have no centres. Behind them there may be
// summaries of the keys, float16 [kv_heads, 8, 2 * k_dim]: kernels/pages/page_format.py says what they are.
typedef struct {
  int64_t page_bytes;
  int64_t key_scales, key_centres, values, value_scales;  // where they begin, in bytes; no centres: 0
  int64_t summaries;                                       // none: 0
  int32_t k_format, v_format;
} PagedKvLayout;

// The pages of one layer. A table entry is slab * slab_stride + page, and all pages of slab s are
// layouts[slab_layouts[s]]. Floats in pages have the dtypes k_dtype and v_dtype.
typedef struct {
  char* const* slabs;
  const int32_t* slab_layouts;
  const PagedKvLayout* layouts;
  int32_t slab_stride;
  int32_t kv_heads, k_dim, v_dim;
  int32_t k_dtype, v_dtype;
} PagedKvPages;

// Where the tokens of each row of a batch are. Of a step of S tokens, row b owns
// [S - end, S - right_padding), end the row's context_len + right_padding; the rest is padding.
// The last of its own is the row's last token.
typedef struct {
  const int32_t* block_tables;   // [batch, table_stride]
  const int32_t* context_lens;   // [batch]
  const int32_t* right_padding;  // [batch]
  int32_t batch, table_stride;
  // Rows that share pages: the rows in an order in which these follow each other, and how many first
  // pages each shares with the one before it; both [batch], or null where no row shares any. Only
  // what is read changes by it, not a bit of the outputs.
  const int32_t *row_order, *shared_pages;
} PagedKvMetadata;

typedef struct {
  float scale;
  int32_t causal;               // a query does not see later tokens
  int32_t window;               // nor those `window` or more before it, nor later ones; 0: no window
  float softcap;                // scores become softcap * tanh(score / softcap); 0: they stay
  int32_t read_tokens;          // of each row, how many tokens a step of one token reads, see
                                // kernels/pages/choice.py; 0: all
  const PagedKvTensor* sinks;   // [q_heads] logits of a key without a value, or null
  const PagedKvTensor* new_k;   // [batch, kv_heads, N, k_dim] and [.., v_dim], or null: a step that
  const PagedKvTensor* new_v;   // the context lengths count but that no page holds yet
} PagedKvOptions;

// The instruction sets that this library has and this machine supports, separated by commas. The
// first is the default.
PAGED_KV_EXPORT const char* paged_kv_instruction_sets(void);
// Which of them later calls use; nonzero if there is no such set. The first, until one is chosen.
PAGED_KV_EXPORT int paged_kv_use_instruction_set(const char* name);
// How many threads later calls use, the caller's included.
PAGED_KV_EXPORT void paged_kv_use_threads(int32_t count);

// Asks the system to back memory with huge pages as it is written; nothing where it has none, or
// refuses.
PAGED_KV_EXPORT void paged_kv_ask_for_huge_pages(void* memory, int64_t bytes);

// Writes a step of keys [batch, kv_heads, S, k_dim] and values [.., v_dim], without its padding, as
// the last tokens of each row, and summaries of the pages that it fills, if pages have some.
// PAGED_KV_BAD_PAGE if a page of theirs holds codes.
PAGED_KV_EXPORT int paged_kv_write(const PagedKvPages* pages, const PagedKvMetadata* metadata,
                                   const PagedKvTensor* keys, const PagedKvTensor* values);
// Attention of a step of queries [batch, q_heads, S, k_dim] over all tokens of their rows, to
// outputs [batch, q_heads, S, v_dim], contiguous and of the queries' dtype. Padding gets zeros.
//
// With position queries it is latent attention: keys are latents and values position keys, of the one
// KV head that all query heads share. Scores are scale * queries [batch, q_heads, S, k_dim] @ latents +
// position_queries [batch, q_heads, S, v_dim] @ position keys, in one dtype; outputs [batch, q_heads, S,
// k_dim] are sums of latents. Else the position queries are null.
PAGED_KV_EXPORT int paged_kv_attend(const PagedKvPages* pages, const PagedKvMetadata* metadata,
                                    const PagedKvTensor* queries,
                                    const PagedKvTensor* position_queries,
                                    const PagedKvTensor* outputs, const PagedKvOptions* options);
// The bytes of pages that attention has read so far, what rows read together counted once.
PAGED_KV_EXPORT int64_t paged_kv_page_bytes_read(void);
// Copies whole pages, also into pages of another layout: what both hold alike is the same bytes. No
// entry is both a source and a target.
PAGED_KV_EXPORT int paged_kv_copy(const PagedKvPages* pages, const int32_t* sources,
                                  const int32_t* targets, int32_t count);
// Fills a page.
PAGED_KV_EXPORT int paged_kv_load(const PagedKvPages* pages, int32_t entry,
                                  const PagedKvTensor* content);

#ifdef __cplusplus
}
#endif
