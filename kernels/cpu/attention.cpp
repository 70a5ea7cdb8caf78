// Plans attention: which query rows and which keys make a task, for how many threads.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "instruction_sets.h"
#include "thread_pool.h"
#include "tensors.h"

namespace paged_kv {
namespace {

// Query rows of one KV head up to which reading takes longer than computing. `attend_many` takes 1.04
// times as long as `attend_few` with 16 rows, and 0.98 to 1.04 times with 24.
constexpr int FEW_ROWS = 16;
// So many tasks to a thread, so that none waits long for the last one. Half as many take 1.02 to
// 1.16 times as long at 1K; twice as many take as long, within what is measured.
constexpr int TASKS_PER_THREAD = 8;
// Numbers of keys and values, for each query, below which waking a thread takes longer than it saves:
// it takes 10 to 20 microseconds. At this many, 256 tokens of 8 heads of 128, one thread still takes
// 0.93 of the time of two where the machine has other work to do, at 4 times as many 1.15 to 1.45.
constexpr int64_t ALONE_NUMBERS = 512 << 10;

struct Task {
  int block;
  int begin, end;
  int part;
};

// A thread's working memory; it grows to what the largest call needed.
class Scratch {
 public:
  float* floats(size_t count) {
    if (count > size_) {
      memory_.reset();
      memory_.reset(static_cast<float*>(operator new(count * sizeof(float), ALIGNMENT)));
      size_ = count;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t ALIGNMENT{64};
  struct Free {
    void operator()(float* memory) const { operator delete(memory, ALIGNMENT); }
  };
  std::unique_ptr<float, Free> memory_;
  size_t size_ = 0;
};

thread_local Scratch task_scratch;
thread_local Scratch call_scratch;

class Plan {
 public:
  Plan(const Attention& attention, const Kernels& kernels) : a_(attention), kernels_(kernels) {
    for (int row = 0; row < a_.metadata->batch; row++) add_blocks(row);
    // Queries that see most come first: the last task to end should be a short one.
    for (size_t i = blocks_.size(); i-- > 0;) add_tasks(static_cast<int>(i));
    unfinished_ = std::vector<std::atomic<int>>(blocks_.size());
    for (size_t i = 0; i < blocks_.size(); i++) unfinished_[i] = parts_[i];
  }

  void run() {
    size_t width = part_floats();
    float* shared = call_scratch.floats(width * shared_parts_);
    auto run_task = [&](int i) { run_one(tasks_[i], shared, width); };
    int count = static_cast<int>(tasks_.size());
    if (numbers_ < ALONE_NUMBERS)
      for (int i = 0; i < count; i++) run_task(i);
    else
      parallel_for(count, run_task);
  }

 private:
  const Attention& a_;
  const Kernels& kernels_;
  std::vector<QueryBlock> blocks_;
  std::vector<int> parts_, first_parts_;
  std::vector<std::atomic<int>> unfinished_;
  std::vector<Task> tasks_;
  int most_rows_ = 0, shared_parts_ = 0;
  int64_t numbers_ = 0, keys_ = 0;

  // All heads share a latent, so that it is read as floats once for all of them.
  bool is_few(const QueryBlock& block) const {
    return !a_.position_queries && block.queries * a_.gqa_group_size <= FEW_ROWS;
  }

  void add_blocks(int row) {
    int length = a_.metadata->context_lens[row];
    Own own = own_tokens(*a_.metadata, row, a_.steps);
    int count = own.end - own.begin;
    int most = std::max(1, kernels_.block_rows / a_.gqa_group_size);
    if (count * a_.gqa_group_size <= FEW_ROWS) most = count;
    for (int head = 0; head < a_.pages->kv_heads; head++)
      for (int first = 0; first < count; first += most) {
        int queries = std::min(most, count - first), position = length - count + first;
        bool hides_later = a_.causal || a_.window;
        int begin = a_.window ? std::max(0, position - a_.window + 1) : 0;
        int end = hides_later ? position + queries : length;
        blocks_.push_back({row, head, own.begin + first, position, queries, begin, end});
        most_rows_ = std::max(most_rows_, queries * a_.gqa_group_size);
        keys_ += end - begin;
      }
    parts_.resize(blocks_.size());
    first_parts_.resize(blocks_.size());
  }

  // Cuts a block's keys at the ends of pages.
  void add_tasks(int index) {
    const QueryBlock& block = blocks_[index];
    int64_t wanted = keys_ / (TASKS_PER_THREAD * thread_count()) + 1;
    int64_t step = (wanted + PAGE_SIZE - 1) / PAGE_SIZE * PAGE_SIZE;
    int64_t first = block.key_begin / PAGE_SIZE * PAGE_SIZE;
    int count = static_cast<int>((block.key_end - first + step - 1) / step);
    for (int i = 0; i < count; i++) {
      int64_t begin = std::max<int64_t>(first + i * step, block.key_begin);
      int64_t end = std::min<int64_t>(first + (i + 1) * step, block.key_end);
      tasks_.push_back({index, static_cast<int>(begin), static_cast<int>(end), i});
    }
    parts_[index] = count;
    first_parts_[index] = shared_parts_;
    if (count > 1) shared_parts_ += count;
    int64_t row = a_.k_dim + a_.v_dim;
    numbers_ += (block.key_end - block.key_begin) * row * block.queries;
  }

  size_t padded_rows() const { return (most_rows_ + kernels_.panel - 1) / kernels_.panel * kernels_.panel; }
  size_t part_floats() const { return padded_rows() * (2 + padded(a_.v_dim)); }

  SplitPartial part_in(float* memory) const {
    return {memory, memory + padded_rows(), memory + 2 * padded_rows()};
  }

  void run_one(const Task& task, float* shared, size_t width) {
    const QueryBlock& block = blocks_[task.block];
    bool few = is_few(block), alone = parts_[task.block] == 1;
    size_t needed = (few ? kernels_.few_scratch : kernels_.many_scratch)(a_, most_rows_);
    float* own = task_scratch.floats(width + needed + padded(a_.v_dim));
    float* first = shared + width * first_parts_[task.block];
    float* mine = alone ? own : first + width * task.part;
    (few ? kernels_.attend_few : kernels_.attend_many)(a_, block, task.begin, task.end,
                                                       part_in(mine), own + width);
    if (unfinished_[task.block].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    int count = parts_[task.block];
    std::vector<SplitPartial> parts;
    for (int i = 0; i < count; i++) parts.push_back(part_in(alone ? own : first + width * i));
    kernels_.finish(a_, block, parts.data(), count, own + width);
  }
};

void clear_padding(const Attention& a) {
  int heads = a.pages->kv_heads * a.gqa_group_size;
  size_t bytes = static_cast<size_t>(a.v_dim) * size_of(*a.outputs);
  for (int row = 0; row < a.metadata->batch; row++) {
    Own own = own_tokens(*a.metadata, row, a.steps);
    if (own.end - own.begin == a.steps) continue;
    for (int head = 0; head < heads; head++)
      for (int step = 0; step < a.steps; step++) {
        if (step >= own.begin && step < own.end) continue;
        size_t place = (static_cast<size_t>(row) * heads + head) * a.steps + step;
        memset(data_of(*a.outputs) + place * bytes, 0, bytes);
        if (a.log_sum_exp) a.log_sum_exp[place] = -INFINITY;
      }
  }
}

// Puts the numbers of an array in order; returns the memory that they are then in.
std::vector<char> make_contiguous(Strided& array) {
  PagedKvTensor& tensor = array.tensor;
  const int64_t* shape = tensor.shape;
  int size = size_of(tensor);
  std::vector<char> memory(shape[0] * shape[1] * shape[2] * shape[3] * size);
  char* to = memory.data();
  for (int64_t i = 0; i < shape[0]; i++)
    for (int64_t j = 0; j < shape[1]; j++)
      for (int64_t k = 0; k < shape[2]; k++)
        for (int64_t d = 0; d < shape[3]; d++, to += size)
          memcpy(to, row_of(tensor, i, j, k) + d * array.strides[3] * size, size);
  tensor.data = memory.data();
  for (int64_t i = 4, step = 1; i-- > 0; step *= shape[i]) array.strides[i] = step;
  return memory;
}

bool fit_latents(const PagedKvPages& pages, const PagedKvTensor& queries,
                 const PagedKvTensor& position_queries) {
  const int64_t* shape = queries.shape;
  return pages.kv_heads == 1 && has_shape(position_queries, shape[0], shape[1], shape[2], pages.v_dim) &&
         format_of(position_queries) == format_of(queries);
}

bool fits(const PagedKvPages& pages, const PagedKvMetadata& metadata, const PagedKvTensor& queries,
          const PagedKvTensor* position_queries, const PagedKvTensor& outputs,
          const PagedKvOptions& options) {
  int v_dim = position_queries ? pages.k_dim : pages.v_dim;
  bool sizes = has_shape(queries, metadata.batch, -1, -1, pages.k_dim) &&
               queries.shape[1] % pages.kv_heads == 0 &&
               has_shape(outputs, metadata.batch, queries.shape[1], queries.shape[2], v_dim);
  if (position_queries && (!sizes || !fit_latents(pages, queries, *position_queries))) return false;
  bool dtypes = format_of(queries) >= 0 && format_of(queries) == format_of(outputs);
  if (!sizes || !dtypes || !is_contiguous(outputs)) return false;
  if (pages.k_dim > LONGEST_HEAD || pages.v_dim > LONGEST_HEAD) return false;
  const PagedKvTensor* sinks = options.sinks;
  if (sinks && (sinks->ndim != 1 || sinks->shape[0] != queries.shape[1] || format_of(*sinks) < 0))
    return false;
  const PagedKvTensor *k = options.new_k, *v = options.new_v;
  return !k || (v && has_shape(*k, metadata.batch, pages.kv_heads, -1, pages.k_dim) &&
                has_shape(*v, metadata.batch, pages.kv_heads, k->shape[2], pages.v_dim) &&
                rows_are_contiguous(*k) && rows_are_contiguous(*v) && format_of(*k) >= 0 &&
                format_of(*v) >= 0);
}

}  // namespace

KeyRun key_run(const Attention& a, const QueryBlock& block, int position, int end) {
  int in_pages = a.metadata->context_lens[block.row];
  Own fresh{0, 0};
  if (a.new_k) {
    fresh = own_tokens(*a.metadata, block.row, a.new_tokens);
    in_pages -= fresh.end - fresh.begin;
  }
  if (position >= in_pages) {
    int token = fresh.begin + position - in_pages;
    return {rows_of(*a.new_k, block.row, block.kv_head, token),
            rows_of(*a.new_v, block.row, block.kv_head, token),
            std::min(PAGE_SIZE - position % PAGE_SIZE, end - position)};
  }
  int64_t place = static_cast<int64_t>(block.row) * a.metadata->table_stride + position / PAGE_SIZE;
  int32_t entry = a.metadata->block_tables[place];
  int page_end = std::min(in_pages, (position / PAGE_SIZE + 1) * PAGE_SIZE);
  return {keys_at(*a.pages, entry, block.kv_head, position % PAGE_SIZE),
          values_at(*a.pages, entry, block.kv_head, position % PAGE_SIZE),
          std::min(page_end, end) - position};
}

}  // namespace paged_kv

using namespace paged_kv;

int paged_kv_attend(const PagedKvPages* pages, const PagedKvMetadata* metadata,
                    const PagedKvTensor* queries, const PagedKvTensor* outputs,
                    const PagedKvOptions* options) {
  return paged_kv_attend_latent(pages, metadata, queries, nullptr, outputs, options);
}

int paged_kv_attend_latent(const PagedKvPages* pages, const PagedKvMetadata* metadata,
                           const PagedKvTensor* queries, const PagedKvTensor* position_queries,
                           const PagedKvTensor* outputs, const PagedKvOptions* options) {
  return guarded([&] {
    Strided q(*queries), position_q(position_queries), out(*outputs);
    Strided new_k(options->new_k), new_v(options->new_v);
    const PagedKvTensor* positions = position_queries ? &position_q.tensor : nullptr;
    if (!fits(*pages, *metadata, q, positions, out, *options)) return PAGED_KV_BAD_ARRAY;
    Attention a{};
    a.pages = pages;
    a.metadata = metadata;
    std::vector<char> copy, position_copy;
    if (!rows_are_contiguous(q)) copy = make_contiguous(q);
    if (positions && !rows_are_contiguous(position_q)) position_copy = make_contiguous(position_q);
    a.queries = &q.tensor;
    a.position_queries = positions;
    a.k_dim = positions ? pages->k_dim + pages->v_dim : pages->k_dim;
    a.v_dim = positions ? pages->k_dim : pages->v_dim;
    a.outputs = &out.tensor;
    a.q_format = format_of(q);
    a.steps = static_cast<int>(q.tensor.shape[2]);
    a.gqa_group_size = static_cast<int>(q.tensor.shape[1] / pages->kv_heads);
    a.scale = options->scale * LOG2_E;
    a.causal = options->causal;
    a.window = options->window;
    a.softcap = options->softcap * LOG2_E;
    a.log_sum_exp = options->log_sum_exp;
    if (options->new_k) {
      a.new_k = &new_k.tensor;
      a.new_v = &new_v.tensor;
      a.new_tokens = static_cast<int>(new_k.tensor.shape[2]);
    }
    std::vector<float> sinks;
    if (options->sinks) {
      sinks = floats_of(*options->sinks);
      for (float& sink : sinks) sink *= LOG2_E;
      a.sinks = sinks.data();
    }
    clear_padding(a);
    Plan(a, chosen_kernels()).run();
    return PAGED_KV_OK;
  });
}
