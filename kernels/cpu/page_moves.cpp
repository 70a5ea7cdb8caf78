// Moving tokens in and out of pages, and whole pages.
#include <sys/mman.h>
#include <unistd.h>

#include "instruction_sets.h"
#include "paged_kv_cpu.h"
#include "tensors.h"
#include "thread_pool.h"

namespace paged_kv {
namespace {

// Bytes below which waking a thread takes longer than it saves.
constexpr int64_t ALONE_BYTES = 512 << 10;
// How many bytes are copied while one is recoded: 0.05 ns a number of 16 bits, and 0.6 to 1.0 ns.
constexpr int64_t RECODING_COST = 16;

template <class Function>
void for_each(int count, int64_t bytes, Function function) {
  if (bytes < ALONE_BYTES)
    for (int i = 0; i < count; i++) function(i);
  else
    parallel_for(count, function);
}

// Where the tokens of one head are in the pages of a row: its keys or its values.
struct HeadOfRow {
  const PagedKvPages& pages;
  const int32_t* table;
  int head;
  bool values;

  HeadOfRow(const PagedKvPages& p, const PagedKvMetadata& metadata, int row, int h, bool v)
      : pages(p), table(metadata.block_tables + static_cast<int64_t>(row) * metadata.table_stride), head(h), values(v) {}

  int dim() const { return values ? pages.v_dim : pages.k_dim; }
  RowRun at(int position) const {
    int32_t entry = table[position / PAGE_SIZE];
    return (values ? values_at : keys_at)(pages, entry, head, position % PAGE_SIZE);
  }
  // Makes the summaries of the full page that begins at a position, if it has some.
  void summarise(int position) const {
    int32_t entry = table[position / PAGE_SIZE];
    if (layout_at(pages, entry).summaries)
      chosen_kernels().summarise(at(position), dim(), summaries_at(pages, entry, head));
  }
};

// How many tokens from a position on lie in one page.
int run_length(int position, int end) {
  return std::min(end - position, PAGE_SIZE - position % PAGE_SIZE);
}

void copy_rows(const RowRun& from, const RowRun& to, int count, int dim) {
  int64_t bytes = row_bytes(to.format, dim);
  if (from.stride == bytes && to.stride == bytes) {
    memcpy(to.data, from.data, count * bytes);
  } else {
    for (int t = 0; t < count; t++) memcpy(to.data + t * to.stride, from.data + t * from.stride, bytes);
  }
  if (is_quantised(to.format)) memcpy(to.scales, from.scales, count * scale_bytes(to.format, dim));
}

// The numbers of a token in order, for a step that has them elsewhere.
std::vector<char> copy_of_row(const PagedKvTensor& step, const char* from) {
  int64_t count = step.shape[3], size = size_of(step);
  std::vector<char> row(count * size);
  for (int64_t i = 0; i < count; i++)
    memcpy(row.data() + i * size, from + i * step.strides[3] * size, size);
  return row;
}

void write_head(const HeadOfRow& pages, const PagedKvTensor& step, int row, Own own, int position) {
  int end = position + own.end - own.begin;
  for (int token = own.begin; position < end;) {
    RowRun from = rows_of(step, row, pages.head, token);
    int count = run_length(position, end);
    if (rows_are_contiguous(step)) {
      copy_rows(from, pages.at(position), count, pages.dim());
    } else {
      std::vector<char> whole = copy_of_row(step, from.data);
      from.data = whole.data();
      count = 1;
      copy_rows(from, pages.at(position), count, pages.dim());
    }
    position += count;
    token += count;
    if (!pages.values && position % PAGE_SIZE == 0) pages.summarise(position - PAGE_SIZE);
  }
}

// Whether the pages of a step's tokens hold floats.
bool holds_floats(const PagedKvPages& pages, const PagedKvMetadata& metadata, int row, Own own) {
  const int32_t* table = metadata.block_tables + static_cast<int64_t>(row) * metadata.table_stride;
  int end = metadata.context_lens[row], begin = end - (own.end - own.begin);
  for (int page = begin / PAGE_SIZE; page * PAGE_SIZE < end; page++) {
    const PagedKvLayout& layout = layout_at(pages, table[page]);
    if (is_quantised(layout.k_format) || is_quantised(layout.v_format)) return false;
  }
  return true;
}

// Copies a page's rows as they are, or recodes them where the two pages hold numbers differently.
void move_rows(const RowRun& from, const RowRun& to, int dim) {
  if (from.format == to.format) {
    copy_rows(from, to, PAGE_SIZE, dim);
    if (to.centre) memcpy(to.centre, from.centre, centre_bytes(dim));
  } else {
    chosen_kernels().recode(from, to, dim);
  }
}

void move_keys(const PagedKvPages& pages, int32_t from, int32_t to, int head) {
  move_rows(keys_at(pages, from, head, 0), keys_at(pages, to, head, 0), pages.k_dim);
  if (layout_at(pages, from).summaries)
    memcpy(summaries_at(pages, to, head), summaries_at(pages, from, head), RUNS_OF_PAGE * summary_bytes(pages.k_dim));
}

bool have_one_layout(const PagedKvPages& pages, int32_t a, int32_t b) {
  return pages.slab_layouts[a / pages.slab_stride] == pages.slab_layouts[b / pages.slab_stride];
}

// Bytes of so many tokens, in the dtypes of the model.
int64_t bytes_of(const PagedKvPages& pages, int64_t tokens) {
  int64_t token = row_bytes(pages.k_dtype, pages.k_dim) + row_bytes(pages.v_dtype, pages.v_dim);
  return pages.kv_heads * tokens * token;
}

bool matches(const PagedKvPages& pages, const PagedKvMetadata& metadata, const PagedKvTensor& keys,
             const PagedKvTensor& values) {
  return has_shape(keys, metadata.batch, pages.kv_heads, -1, pages.k_dim) &&
         has_shape(values, metadata.batch, pages.kv_heads, keys.shape[2], pages.v_dim) &&
         format_of(keys) == pages.k_dtype && format_of(values) == pages.v_dtype;
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

int paged_kv_write(const PagedKvPages* pages, const PagedKvMetadata* metadata, const PagedKvTensor* keys,
                   const PagedKvTensor* values) {
  return guarded([&] {
    Strided k(*keys), v(*values);
    if (!matches(*pages, *metadata, k, v)) return PAGED_KV_BAD_ARRAY;
    int heads = pages->kv_heads, count = static_cast<int>(k.tensor.shape[2]);
    for (int row = 0; row < metadata->batch; row++)
      if (!holds_floats(*pages, *metadata, row, own_tokens(*metadata, row, count))) return PAGED_KV_BAD_PAGE;
    for_each(metadata->batch * heads, bytes_of(*pages, count * metadata->batch), [&](int i) {
      int row = i / heads, head = i % heads;
      Own own = own_tokens(*metadata, row, count);
      int position = metadata->context_lens[row] - (own.end - own.begin);
      write_head({*pages, *metadata, row, head, false}, k, row, own, position);
      write_head({*pages, *metadata, row, head, true}, v, row, own, position);
    });
    return PAGED_KV_OK;
  });
}

int paged_kv_copy(const PagedKvPages* pages, const int32_t* sources, const int32_t* targets,
                  int32_t count) {
  return guarded([&] {
    int heads = pages->kv_heads;
    bool recodes = false;
    for (int i = 0; i < count; i++) recodes |= !have_one_layout(*pages, sources[i], targets[i]);
    int64_t bytes = bytes_of(*pages, static_cast<int64_t>(count) * PAGE_SIZE);
    for_each(2 * count * heads, recodes ? bytes * RECODING_COST : bytes, [&](int i) {
      int32_t from = sources[i / 2 / heads], to = targets[i / 2 / heads];
      int head = i / 2 % heads;
      if (i % 2)
        move_rows(values_at(*pages, from, head, 0), values_at(*pages, to, head, 0), pages->v_dim);
      else
        move_keys(*pages, from, to, head);
    });
    return PAGED_KV_OK;
  });
}

int paged_kv_load(const PagedKvPages* pages, int32_t entry, const PagedKvTensor* content) {
  return guarded([&] {
    Strided page(*content);
    int64_t bytes = size_of(page);
    for (int i = 0; i < page.tensor.ndim; i++) bytes *= page.tensor.shape[i];
    if (page.tensor.ndim < 0 || bytes != layout_at(*pages, entry).page_bytes || !is_contiguous(page))
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
