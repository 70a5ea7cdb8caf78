// Moving tokens in and out of pages, and whole pages. Bytes are moved as they are.
#include <sys/mman.h>
#include <unistd.h>

#include "paged_kv_cpu.h"
#include "tensors.h"
#include "thread_pool.h"

namespace paged_kv {
namespace {

// Bytes below which waking a thread takes longer than it saves.
constexpr int64_t ALONE_BYTES = 512 << 10;

template <class Function>
void for_each(int count, int64_t bytes, Function function) {
  if (bytes < ALONE_BYTES)
    for (int i = 0; i < count; i++) function(i);
  else
    parallel_for(count, function);
}

// Where the tokens of one head are in the pages of a row.
struct PlaneOfRow {
  const PagedKvPages& pages;
  const int32_t* table;
  int64_t offset, bytes;

  PlaneOfRow(const PagedKvPages& p, const PagedKvRows& rows, int row, int head, bool values)
      : pages(p), table(rows.block_tables + static_cast<int64_t>(row) * rows.table_stride) {
    bytes = values ? row_bytes(p.v_format, p.v_dim) : row_bytes(p.k_format, p.k_dim);
    offset = (values ? p.value_offset : 0) + head * PAGE_SIZE * bytes;
  }

  char* at(int position) const {
    return page_at(pages, table[position / PAGE_SIZE]) + offset + position % PAGE_SIZE * bytes;
  }
};

// How many tokens from a position on lie in one page.
int run_length(int position, int end) {
  return std::min(end - position, PAGE_SIZE - position % PAGE_SIZE);
}

void copy_numbers(char* to, const char* from, int64_t stride, int count, int size) {
  for (int i = 0; i < count; i++) memcpy(to + i * size, from + i * stride * size, size);
}

void write_head(const PlaneOfRow& plane, const PagedKvTensor& step, int row, int head, Own own,
                int position) {
  bool rows_whole = rows_are_contiguous(step), all_whole = rows_whole && token_stride(step) == plane.bytes;
  int end = position + own.end - own.begin;
  for (int token = own.begin; position < end;) {
    int count = run_length(position, end);
    char* to = plane.at(position);
    if (all_whole) {
      memcpy(to, row_of(step, row, head, token), count * plane.bytes);
    } else {
      for (int i = 0; i < count; i++, to += plane.bytes) {
        const char* from = row_of(step, row, head, token + i);
        if (rows_whole) memcpy(to, from, plane.bytes);
        else copy_numbers(to, from, step.strides[3], static_cast<int>(step.shape[3]), size_of(step));
      }
    }
    position += count;
    token += count;
  }
}

void gather_head(const PlaneOfRow& plane, const PagedKvRows& rows, int row, char* out, int tokens) {
  int length = rows.context_lens[row], behind = rows.right_padding[row];
  int before = tokens - behind - length;
  memset(out, 0, before * plane.bytes);
  out += before * plane.bytes;
  for (int position = 0; position < length;) {
    int count = run_length(position, length);
    memcpy(out, plane.at(position), count * plane.bytes);
    out += count * plane.bytes;
    position += count;
  }
  memset(out, 0, behind * plane.bytes);
}

bool matches(const PagedKvPages& pages, const PagedKvRows& rows, const PagedKvTensor& keys,
             const PagedKvTensor& values) {
  return has_shape(keys, rows.batch, pages.kv_heads, -1, pages.k_dim) &&
         has_shape(values, rows.batch, pages.kv_heads, keys.shape[2], pages.v_dim) &&
         format_of(keys) == pages.k_format && format_of(values) == pages.v_format;
}

}  // namespace

float float16_at(const char* at) {
  uint16_t bits;
  memcpy(&bits, at, sizeof bits);
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                    : exponent     ? ldexpf(static_cast<float>(fraction + 1024), exponent - 25)
                                   : ldexpf(static_cast<float>(fraction), -24);
  return bits >> 15 ? -magnitude : magnitude;
}

float number_at(const char* at, int format) {
  if (format == PAGED_KV_F16) return float16_at(at);
  char bytes[4] = {};  // a bfloat16 is the upper half of a float; all machines are little-endian
  if (format == PAGED_KV_BF16) memcpy(bytes + 2, at, 2);
  else memcpy(bytes, at, 4);
  float number;
  memcpy(&number, bytes, sizeof number);
  return number;
}

std::vector<float> floats_of(const PagedKvTensor& given) {
  Strided array(given);
  std::vector<float> floats(array.tensor.shape[0]);
  for (size_t i = 0; i < floats.size(); i++) {
    const char* at = data_of(array) + i * array.strides[0] * size_of(array);
    floats[i] = number_at(at, format_of(array));
  }
  return floats;
}

}  // namespace paged_kv

using namespace paged_kv;

int paged_kv_write(const PagedKvPages* pages, const PagedKvRows* rows, const PagedKvTensor* keys,
                   const PagedKvTensor* values) {
  return guarded([&] {
    Strided k(*keys), v(*values);
    if (!matches(*pages, *rows, k, v)) return PAGED_KV_BAD_ARRAY;
    int heads = pages->kv_heads, count = static_cast<int>(k.tensor.shape[2]);
    int64_t bytes = pages->page_bytes / PAGE_SIZE * count * rows->batch;
    for_each(rows->batch * heads, bytes, [&](int i) {
      int row = i / heads, head = i % heads;
      Own own = own_tokens(*rows, row, count);
      int position = rows->context_lens[row] - (own.end - own.begin);
      write_head({*pages, *rows, row, head, false}, k, row, head, own, position);
      write_head({*pages, *rows, row, head, true}, v, row, head, own, position);
    });
    return PAGED_KV_OK;
  });
}

int paged_kv_gather(const PagedKvPages* pages, const PagedKvRows* rows, const PagedKvTensor* keys,
                    const PagedKvTensor* values) {
  return guarded([&] {
    Strided k(*keys), v(*values);
    if (!matches(*pages, *rows, k, v) || !is_contiguous(k) || !is_contiguous(v))
      return PAGED_KV_BAD_ARRAY;
    int heads = pages->kv_heads, tokens = static_cast<int>(k.tensor.shape[2]);
    for (int row = 0; row < rows->batch; row++)
      if (rows->context_lens[row] + rows->right_padding[row] > tokens) return PAGED_KV_BAD_ARRAY;
    int64_t bytes = pages->page_bytes / PAGE_SIZE * tokens * rows->batch;
    for_each(rows->batch * heads, bytes, [&](int i) {
      int row = i / heads, head = i % heads;
      gather_head({*pages, *rows, row, head, false}, *rows, row, row_of(k, row, head, 0), tokens);
      gather_head({*pages, *rows, row, head, true}, *rows, row, row_of(v, row, head, 0), tokens);
    });
    return PAGED_KV_OK;
  });
}

int paged_kv_copy(const PagedKvPages* pages, const int32_t* sources, const int32_t* targets,
                  int32_t count) {
  return guarded([&] {
    for_each(count, count * pages->page_bytes, [&](int i) {
      memcpy(page_at(*pages, targets[i]), page_at(*pages, sources[i]), pages->page_bytes);
    });
    return PAGED_KV_OK;
  });
}

int paged_kv_load(const PagedKvPages* pages, int32_t entry, const PagedKvTensor* content) {
  return guarded([&] {
    Strided page(*content);
    int64_t bytes = size_of(page);
    for (int i = 0; i < page.tensor.ndim; i++) bytes *= page.tensor.shape[i];
    if (page.tensor.ndim < 0 || bytes != pages->page_bytes || !is_contiguous(page))
      return PAGED_KV_BAD_ARRAY;
    memcpy(page_at(*pages, entry), data_of(page), bytes);
    return PAGED_KV_OK;
  });
}

void paged_kv_ask_for_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  uintptr_t page = sysconf(_SC_PAGESIZE), begin = reinterpret_cast<uintptr_t>(memory);
  uintptr_t first = (begin + page - 1) / page * page, end = (begin + bytes) / page * page;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

void paged_kv_use_threads(int32_t count) { use_threads(count); }
