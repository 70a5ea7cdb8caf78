// Plans attention: which query rows and which keys make a task, for how many threads.
//
// The keys of a block are cut at multiples of a step, the parts, whatever other rows do. So a query
// row's sums are made and merged in the same order in every company. Rows that share pages make a task
// together for each part that they share a page of.
#pragma once

#include <limits.h>

#include <algorithm>
#include <vector>

#include "attention.h"
#include "tensors.h"
#include "thread_pool.h"

namespace paged_kv {

// Query rows of one KV head up to which reading takes longer than computing. `attend_many` takes 1.04
// times as long as `attend_few` with 16 rows, and 0.98 to 1.04 times with 24.
constexpr int FEW_ROWS = 16;
// So many tasks to a thread, so that none waits long for the last one. Half as many take 1.02 to
// 1.16 times as long at 1K; twice as many take as long, within what is measured.
constexpr int TASKS_PER_THREAD = 8;
// So many parts, of all heads together, does the longest row have for each thread, whatever other rows
// there are: rows that share a prompt make one task for each.
constexpr int PARTS_PER_THREAD = 4;
// Where that leaves fewer tasks than so many for each thread, rows that share pages make several.
constexpr int SHARED_TASKS_PER_THREAD = 2;
// So many query rows of a few each make a task: their sums, and their scores of a page, stay in the
// second-level cache.
constexpr int MOST_FEW_ROWS = 128;

struct PlannedBlock : QueryBlock {
  int first_step, parts;  // its first part's number among all multiples of the step, and how many it has
  int first_part;         // in memory
};

struct PlannedTask {
  int step;                        // the number of the part
  int first_block, block_count;    // of `task_blocks`
  int first_span, span_count;      // of `spans`
  int rows;                        // query rows
  bool few, is_alone;              // whether it is the only part of its blocks
  size_t part_at;                  // where its sums are in the shared memory
};

// The tokens of a row that pages hold.
inline int tokens_in_pages(const Attention& a, int row) {
  int length = a.metadata->context_lens[row];
  if (!a.new_k) return length;
  Own fresh = own_tokens(*a.metadata, row, a.new_tokens);
  return length - (fresh.end - fresh.begin);
}

class Plan {
 public:
  std::vector<PlannedBlock> blocks;
  std::vector<QueryBlock> task_blocks;
  std::vector<int> block_numbers;  // of `task_blocks`, in `blocks`
  std::vector<Span> spans;
  std::vector<PlannedTask> tasks;
  int part_count = 0;
  size_t shared_floats = 0;
  int64_t numbers = 0;  // of keys and values, for each query

  Plan(const Attention& attention, int block_rows) : a_(attention), block_rows_(block_rows) {
    for (int i = 0; i < a_.metadata->batch; i++) add_blocks(i);
    choose_step();
    for (PlannedBlock& block : blocks) add_parts(block);
    // Queries that see most come first: the last task to end should be a short one.
    for (int end = static_cast<int>(rows_.size()), begin; end > 0; end = begin) {
      begin = end - 1;
      while (rows_[begin].shared) begin--;
      add_tasks(begin, end);
    }
  }

  size_t part_floats(int rows) const {
    return 2 * padded(rows) + static_cast<size_t>(rows) * padded(a_.v_dim);
  }

 private:
  // A row with queries, in the order of the tree of shared pages.
  struct Row {
    int first_block, chunks;  // blocks of a head
    int seen_pages;           // pages that all its queries see whole, from the first one or a window's
    int shared;               // of these, those that the row before has and sees whole, too
    int window_begin;         // the first position that all its queries see
    int query_rows;
  };

  const Attention& a_;
  int block_rows_;
  std::vector<Row> rows_;
  int shared_with_last_ = 0;  // pages that a row shares with the last of `rows_`
  int64_t keys_ = 0, step_ = PAGE_SIZE;
  int most_together_ = 1;  // rows of a task

  // All heads share a latent, so that it is read as floats once for all of them.
  bool is_few(int query_rows) const { return !a_.position_queries && query_rows <= FEW_ROWS; }

  void add_blocks(int at) {
    const PagedKvMetadata& metadata = *a_.metadata;
    int row = metadata.row_order ? metadata.row_order[at] : at;
    shared_with_last_ = std::min(shared_with_last_, metadata.shared_pages ? metadata.shared_pages[at] : 0);
    int length = metadata.context_lens[row];
    Own own = own_tokens(metadata, row, a_.steps);
    int count = own.end - own.begin, position = length - count;
    if (!count) return;
    int most = std::max(1, block_rows_ / a_.gqa_group_size);
    if (count * a_.gqa_group_size <= FEW_ROWS) most = count;
    bool hides_later = a_.causal || a_.window;
    Row planned{static_cast<int>(blocks.size()), (count + most - 1) / most, 0, 0, 0, 0};
    for (int head = 0; head < a_.pages->kv_heads; head++)
      for (int first = 0; first < count; first += most) {
        int queries = std::min(most, count - first), at = position + first;
        int begin = a_.window ? std::max(0, at - a_.window + 1) : 0;
        int end = hides_later ? at + queries : length;
        QueryBlock block{row, head, own.begin + first, at, queries, begin, end, 0};
        blocks.push_back({block, 0, 0, 0});
        keys_ += end - begin;
        numbers += int64_t{end - begin} * (a_.k_dim + a_.v_dim) * queries;
      }
    planned.query_rows = count * a_.gqa_group_size;
    planned.window_begin = a_.window ? std::max(0, length - a_.window) : 0;
    planned.seen_pages = std::min(hides_later ? position + 1 : length, tokens_in_pages(a_, row)) / PAGE_SIZE;
    if (!rows_.empty() && planned.chunks == 1 && rows_.back().chunks == 1)
      planned.shared = std::min({shared_with_last_, planned.seen_pages, rows_.back().seen_pages});
    shared_with_last_ = INT_MAX;
    rows_.push_back(planned);
  }

  void choose_step() {
    int64_t wanted = keys_ / (TASKS_PER_THREAD * thread_count()) + 1, longest = 0;
    for (const Row& row : rows_)
      if (row.chunks == 1) longest = std::max<int64_t>(longest, blocks[row.first_block].key_end);
    if (longest)
      wanted = std::min(wanted, longest * a_.pages->kv_heads / (PARTS_PER_THREAD * thread_count()) + 1);
    step_ = (wanted + PAGE_SIZE - 1) / PAGE_SIZE * PAGE_SIZE;
    int64_t tasks = (longest + step_ - 1) / step_ * a_.pages->kv_heads;
    int64_t missing = tasks ? (SHARED_TASKS_PER_THREAD * thread_count() + tasks - 1) / tasks : 1;
    most_together_ = static_cast<int>((rows_.size() + missing - 1) / missing);
  }

  void add_parts(PlannedBlock& block) {
    block.first_step = static_cast<int>(block.key_begin / step_);
    block.parts = static_cast<int>((block.key_end - 1) / step_) - block.first_step + 1;
    block.first_part = part_count;
    part_count += block.parts;
  }

  bool has_part(const PlannedBlock& block, int step) const {
    return step >= block.first_step && step < block.first_step + block.parts;
  }

  // The tasks of rows [begin, end), which share pages if they are several.
  void add_tasks(int begin, int end) {
    const Row& row = rows_[begin];
    for (int head = a_.pages->kv_heads; head-- > 0;) {
      if (end - begin == 1)
        for (int i = row.chunks; i-- > 0;) {
          const PlannedBlock& block = blocks[row.first_block + head * row.chunks + i];
          for (int step = block.first_step; has_part(block, step); step++)
            add_task({row.first_block + head * row.chunks + i}, step, begin);
        }
      else
        add_shared_tasks(begin, end, head);
    }
  }

  void add_shared_tasks(int begin, int end, int head) {
    int last = 0;
    for (int i = begin; i < end; i++) {
      const PlannedBlock& block = blocks[rows_[i].first_block + head];
      last = std::max(last, block.first_step + block.parts - 1);
    }
    for (int step = 0; step <= last; step++)
      for (int first = begin, next; first < end; first = next) {
        next = first + 1;
        if (!has_part(blocks[rows_[first].first_block + head], step)) continue;
        int query_rows = rows_[first].query_rows, limit = is_few(query_rows) ? MOST_FEW_ROWS : block_rows_;
        std::vector<int> numbers{rows_[first].first_block + head};
        for (; next < end && next - first < most_together_; next++) {
          const Row& row = rows_[next];
          query_rows += row.query_rows;
          bool is_shared = row.shared * PAGE_SIZE > step * step_;
          bool is_alike = is_few(row.query_rows) == is_few(rows_[first].query_rows);
          if (!is_shared || !is_alike || query_rows > limit || !has_part(blocks[row.first_block + head], step))
            break;
          numbers.push_back(row.first_block + head);
        }
        add_task(numbers, step, first);
      }
  }

  // The task of these blocks' parts of one number; the blocks are those of rows from `row` on.
  void add_task(const std::vector<int>& numbers, int step, int row) {
    PlannedTask task{};
    task.step = step;
    task.first_block = static_cast<int>(task_blocks.size());
    task.block_count = static_cast<int>(numbers.size());
    task.first_span = static_cast<int>(spans.size());
    task.few = is_few(blocks[numbers[0]].queries * a_.gqa_group_size);
    task.is_alone = true;
    for (int number : numbers) {
      PlannedBlock& block = blocks[number];
      block.first_row = task.rows;
      task.rows += block.queries * a_.gqa_group_size;
      task.is_alone = task.is_alone && block.parts == 1;
      task_blocks.push_back(block);
      block_numbers.push_back(number);
    }
    add_spans(task, row, 0, task.block_count, static_cast<int>(step * step_),
              static_cast<int>((step + 1) * step_));
    task.span_count = static_cast<int>(spans.size()) - task.first_span;
    task.part_at = shared_floats;
    if (!task.is_alone) shared_floats += part_floats(task.rows);
    tasks.push_back(task);
  }

  void add_own_span(const PlannedTask& task, int at, int begin, int end) {
    const QueryBlock& block = task_blocks[task.first_block + at];
    begin = std::max(begin, block.key_begin);
    end = std::min(end, block.key_end);
    if (begin < end) spans.push_back({at, 1, begin, end});
  }

  // The spans of the task's blocks [low, high), whose rows begin at `row`, for keys [begin, end): what all
  // of them share, then what some of them do.
  void add_spans(const PlannedTask& task, int row, int low, int high, int begin, int end) {
    if (high - low == 1) return add_own_span(task, low, begin, end);
    int window_begin = 0, shared = end / PAGE_SIZE;
    for (int i = low; i < high; i++) {
      window_begin = std::max(window_begin, rows_[row + i].window_begin);
      if (i > low) shared = std::min(shared, rows_[row + i].shared);
    }
    int all_see = (window_begin + PAGE_SIZE - 1) / PAGE_SIZE * PAGE_SIZE;
    if (all_see > begin) {
      all_see = std::min(all_see, end);
      for (int i = low; i < high; i++) add_own_span(task, i, begin, all_see);
      begin = all_see;
    }
    if (shared * PAGE_SIZE > begin) {
      spans.push_back({low, high - low, begin, shared * PAGE_SIZE});
      begin = shared * PAGE_SIZE;
    }
    if (begin >= end) return;
    for (int next; low < high; low = next) {
      for (next = low + 1; next < high && rows_[row + next].shared * PAGE_SIZE > begin;) next++;
      add_spans(task, row, low, next, begin, end);
    }
  }
};

}  // namespace paged_kv
