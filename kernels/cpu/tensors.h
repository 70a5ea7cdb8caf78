// Access to arrays and pages, for the code that plans the kernels' work.
#pragma once

#include <math.h>
#include <string.h>

#include <algorithm>
#include <new>
#include <vector>

#include "attention.h"

namespace paged_kv {

// An array of up to 4 dimensions with its offset applied and its strides filled in.
struct Strided {
  PagedKvTensor tensor{};
  int64_t strides[4] = {};

  explicit Strided(const PagedKvTensor* given) {
    if (given) fill(*given);
  }
  explicit Strided(const PagedKvTensor& given) { fill(given); }
  Strided(const Strided&) = delete;
  operator const PagedKvTensor&() const { return tensor; }

 private:
  void fill(const PagedKvTensor& given) {
    tensor = given;
    tensor.data = static_cast<char*>(given.data) + given.byte_offset;
    tensor.byte_offset = 0;
    tensor.strides = strides;
    if (given.ndim > 4) {
      tensor.ndim = -1;  // no shape is asked for that it has
      return;
    }
    for (int64_t i = given.ndim, step = 1; i-- > 0; step *= given.shape[i])
      strides[i] = given.strides ? given.strides[i] : step;
  }
};

inline char* data_of(const PagedKvTensor& tensor) { return static_cast<char*>(tensor.data); }

inline int size_of(const PagedKvTensor& tensor) { return tensor.type_bits / 8; }

// The format of a row of such numbers; negative if no page holds them.
inline int format_of(const PagedKvTensor& tensor) {
  enum { FLOAT = 2, BFLOAT = 4 };  // DLPack's type codes
  if (tensor.type_lanes != 1) return -1;
  if (tensor.type_code == FLOAT && tensor.type_bits == 32) return PAGED_KV_F32;
  if (tensor.type_code == FLOAT && tensor.type_bits == 16) return PAGED_KV_F16;
  if (tensor.type_code == BFLOAT && tensor.type_bits == 16) return PAGED_KV_BF16;
  return -1;
}

// -1 stands for any size.
inline bool has_shape(const PagedKvTensor& tensor, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t wanted[] = {a, b, c, d};
  if (tensor.ndim != 4) return false;
  for (int i = 0; i < 4; i++)
    if (wanted[i] >= 0 && wanted[i] != tensor.shape[i]) return false;
  return true;
}

inline bool rows_are_contiguous(const PagedKvTensor& tensor) {
  return tensor.strides[3] == 1 || tensor.shape[3] == 1;
}

inline bool is_contiguous(const PagedKvTensor& tensor) {
  int64_t step = 1;
  for (int i = tensor.ndim; i-- > 0; step *= tensor.shape[i])
    if (tensor.shape[i] != 1 && tensor.strides[i] != step) return false;
  return true;
}

inline char* row_of(const PagedKvTensor& tensor, int64_t batch, int64_t head, int64_t token) {
  const int64_t* strides = tensor.strides;
  return data_of(tensor) +
         (batch * strides[0] + head * strides[1] + token * strides[2]) * size_of(tensor);
}

inline ptrdiff_t token_stride(const PagedKvTensor& tensor) {
  return tensor.strides[2] * size_of(tensor);
}

std::vector<float> floats_of(const PagedKvTensor& tensor);

// Rows of a step; its numbers must be contiguous in each.
inline RowRun rows_of(const PagedKvTensor& tensor, int64_t batch, int64_t head, int64_t token) {
  return {row_of(tensor, batch, head, token), token_stride(tensor), format_of(tensor), nullptr};
}

inline int64_t row_bytes(int format, int dim) {
  constexpr int BITS[] = {32, 16, 16, 8, 4, 4};  // without fifth bits
  return static_cast<int64_t>(dim) * BITS[format] / 8;
}

inline int64_t scale_bytes(int format, int dim) {
  return scale_words(format, dim) * static_cast<int64_t>(sizeof(uint16_t));
}

inline int64_t centre_bytes(int dim) { return dim * static_cast<int64_t>(sizeof(uint16_t)); }

inline const PagedKvLayout& layout_at(const PagedKvPages& pages, int32_t entry) {
  return pages.layouts[pages.slab_layouts[entry / pages.slab_stride]];
}

inline char* page_at(const PagedKvPages& pages, int32_t entry) {
  int64_t page = entry % pages.slab_stride;
  return pages.slabs[entry / pages.slab_stride] + page * layout_at(pages, entry).page_bytes;
}

// The keys of a head in one page, from a token on.
inline RowRun keys_at(const PagedKvPages& pages, int32_t entry, int head, int token) {
  const PagedKvLayout& layout = layout_at(pages, entry);
  int64_t row = static_cast<int64_t>(head) * PAGE_SIZE + token;
  int64_t bytes = row_bytes(layout.k_format, pages.k_dim);
  char* page = page_at(pages, entry);
  return {page + row * bytes, bytes, layout.k_format,
          page + layout.key_scales + row * scale_bytes(layout.k_format, pages.k_dim),
          layout.key_centres ? page + layout.key_centres + head * centre_bytes(pages.k_dim) : nullptr};
}

// And the values.
inline RowRun values_at(const PagedKvPages& pages, int32_t entry, int head, int token) {
  const PagedKvLayout& layout = layout_at(pages, entry);
  int64_t row = static_cast<int64_t>(head) * PAGE_SIZE + token;
  int64_t bytes = row_bytes(layout.v_format, pages.v_dim);
  char* page = page_at(pages, entry);
  return {page + layout.values + row * bytes, bytes, layout.v_format,
          page + layout.value_scales + row * scale_bytes(layout.v_format, pages.v_dim)};
}

inline int64_t summary_bytes(int dim) { return 2 * dim * static_cast<int64_t>(sizeof(uint16_t)); }

// The summaries of a head's keys in one page.
inline char* summaries_at(const PagedKvPages& pages, int32_t entry, int head) {
  return page_at(pages, entry) + layout_at(pages, entry).summaries + head * RUNS_OF_PAGE * summary_bytes(pages.k_dim);
}

// A step's tokens [begin, end) that are not padding.
struct Own {
  int begin, end;
};

inline Own own_tokens(const PagedKvMetadata& metadata, int row, int count) {
  int padding = metadata.right_padding[row], end = metadata.context_lens[row] + padding;
  int first = std::max(0, count - end);
  return {first, std::max(first, count - padding)};
}

// No exception leaves the library.
template <class Function>
int guarded(Function&& function) {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return PAGED_KV_NO_MEMORY;
  }
}

}  // namespace paged_kv
