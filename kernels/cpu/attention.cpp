// Attention: checks what it is asked for, and runs the tasks of `plan.h` on the threads.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "instruction_sets.h"
#include "choice.h"
#include "plan.h"
#include "tensors.h"
#include "thread_pool.h"

namespace paged_kv {
namespace {

// Numbers of keys and values, for each query, below which waking a thread takes longer than it saves:
// it takes 10 to 20 microseconds. At this many, 256 tokens of 8 heads of 128, one thread still takes
// 0.93 of the time of two where the machine has other work to do, at 4 times as many 1.15 to 1.45.
constexpr int64_t ALONE_NUMBERS = 512 << 10;

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

std::atomic<int64_t> page_bytes_read{0};

// Runs a plan's tasks, and merges the parts of a block after the last of them.
class Run {
 public:
  Run(const Attention& attention, const Kernels& kernels)
      : a_(attention), kernels_(kernels), plan_(attention, kernels.block_rows),
        parts_(plan_.part_count), unfinished_(plan_.blocks.size()) {
    for (size_t i = 0; i < plan_.blocks.size(); i++) unfinished_[i] = plan_.blocks[i].parts;
  }

  void operator()() {
    shared_ = call_scratch.floats(plan_.shared_floats);
    auto run_task = [&](int i) { run_one(plan_.tasks[i]); };
    int count = static_cast<int>(plan_.tasks.size());
    if (plan_.numbers < ALONE_NUMBERS)
      for (int i = 0; i < count; i++) run_task(i);
    else
      parallel_for(count, run_task);
  }

 private:
  const Attention& a_;
  const Kernels& kernels_;
  const Plan plan_;
  std::vector<SplitPartial> parts_;
  std::vector<std::atomic<int>> unfinished_;
  float* shared_ = nullptr;

  void run_one(const PlannedTask& planned) {
    const QueryBlock* blocks = &plan_.task_blocks[planned.first_block];
    int rows = planned.rows, count = planned.block_count;
    size_t width = plan_.part_floats(rows), stride = padded(a_.v_dim);
    size_t needed = (planned.few ? kernels_.few_scratch : kernels_.many_scratch)(a_, rows);
    float* own = task_scratch.floats(width + needed + stride);
    float* memory = planned.is_alone ? own : shared_ + planned.part_at;
    size_t columns = padded(rows);
    Task task{blocks, &plan_.spans[planned.first_span], count, planned.span_count,
              {memory, memory + columns, memory + 2 * columns}, planned.few};
    page_bytes_read += (planned.few ? kernels_.attend_few : kernels_.attend_many)(a_, task, own + width);
    for (int i = 0; i < count; i++) {
      int number = plan_.block_numbers[planned.first_block + i], first = blocks[i].first_row;
      const PlannedBlock& block = plan_.blocks[number];
      parts_[block.first_part + planned.step - block.first_step] = {
          task.part.maximum + first, task.part.sum + first, task.part.values + first * stride};
      if (unfinished_[number].fetch_sub(1, std::memory_order_acq_rel) == 1)
        kernels_.finish(a_, blocks[i], &parts_[block.first_part], block.parts, own + width);
    }
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

int32_t entry_of(const Attention& a, int row, int page) {
  return a.metadata->block_tables[static_cast<int64_t>(row) * a.metadata->table_stride + page];
}

// The runs that a block reads, or null if it reads all.
const int32_t* chosen_runs(const Attention& a, const QueryBlock& block) {
  if (!a.runs) return nullptr;
  const int32_t* runs = a.runs + (block.row * a.pages->kv_heads + block.kv_head) * static_cast<int64_t>(a.run_count);
  return *runs < 0 ? nullptr : runs;
}

// The same as `key_run`, where a position counts the tokens of chosen runs.
KeyRun chosen_run(const Attention& a, const QueryBlock& block, const int32_t* runs, int position, int end) {
  int run = runs[position / RUN_TOKENS], token = run * RUN_TOKENS + position % RUN_TOKENS;
  int run_end = (position / RUN_TOKENS + 1) * RUN_TOKENS;
  // Runs of a page that follow each other are one.
  for (; run_end < end && (run + 1) % RUNS_OF_PAGE && runs[run_end / RUN_TOKENS] == run + 1; run++)
    run_end += RUN_TOKENS;
  int32_t entry = entry_of(a, block.row, token / PAGE_SIZE);
  return {keys_at(*a.pages, entry, block.kv_head, token % PAGE_SIZE),
          values_at(*a.pages, entry, block.kv_head, token % PAGE_SIZE), std::min(run_end, end) - position, true};
}

}  // namespace

char* summaries_of(const Attention& a, int row, int page, int kv_head) {
  return summaries_at(*a.pages, entry_of(a, row, page), kv_head);
}

KeyRun key_run(const Attention& a, const QueryBlock& block, int position, int end) {
  int in_pages = tokens_in_pages(a, block.row);
  if (position >= in_pages) {
    Own fresh = own_tokens(*a.metadata, block.row, a.new_tokens);
    int token = fresh.begin + position - in_pages;
    return {rows_of(*a.new_k, block.row, block.kv_head, token),
            rows_of(*a.new_v, block.row, block.kv_head, token),
            std::min(PAGE_SIZE - position % PAGE_SIZE, end - position), false};
  }
  if (const int32_t* runs = chosen_runs(a, block)) return chosen_run(a, block, runs, position, end);
  int32_t entry = entry_of(a, block.row, position / PAGE_SIZE);
  int page_end = std::min(in_pages, (position / PAGE_SIZE + 1) * PAGE_SIZE);
  return {keys_at(*a.pages, entry, block.kv_head, position % PAGE_SIZE),
          values_at(*a.pages, entry, block.kv_head, position % PAGE_SIZE),
          std::min(page_end, end) - position, true};
}

}  // namespace paged_kv

using namespace paged_kv;

int paged_kv_attend(const PagedKvPages* pages, const PagedKvMetadata* metadata,
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
    if (!positions && Choice::is_needed(a, options->read_tokens)) {
      Choice choice(a, chosen_kernels(), options->read_tokens);
      page_bytes_read += choice.bytes_read();
      Run(choice.attention(), chosen_kernels())();
    } else {
      Run(a, chosen_kernels())();
    }
    return PAGED_KV_OK;
  });
}

int64_t paged_kv_page_bytes_read(void) { return page_bytes_read; }
