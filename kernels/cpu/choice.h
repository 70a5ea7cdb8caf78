// Chooses the runs that a step of one token reads: kernels/pages/choice.py says how.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "attention.h"
#include "tensors.h"
#include "thread_pool.h"

namespace paged_kv {

// So many runs are always read before the last one.
constexpr int LATEST_RUNS = 3;
// Pages whose summaries a task scores, for all query heads of a KV head.
constexpr int SCORED_PAGES = 64;

class Choice {
 public:
  static bool is_needed(const Attention& a, int read_tokens) {
    if (!read_tokens || a.steps != 1 || a.window || a.new_k) return false;
    for (int row = 0; row < a.metadata->batch; row++)
      if (is_chosen(*a.metadata, row, read_tokens)) return true;
    return false;
  }

  Choice(const Attention& a, const Kernels& kernels, int read_tokens)
      : a_(a), kernels_(kernels), heads_(a.pages->kv_heads), run_count_(read_tokens / RUN_TOKENS),
        lengths_(a.metadata->context_lens, a.metadata->context_lens + a.metadata->batch),
        runs_(static_cast<size_t>(a.metadata->batch) * heads_ * run_count_, -1) {
    for (int row = 0; row < a.metadata->batch; row++)
      if (is_chosen(*a.metadata, row, read_tokens)) rows_.push_back({row, full_pages(row)});
    score();
    auto choose_one = [&](int i) { choose(i / heads_, i % heads_); };
    parallel_for(static_cast<int>(rows_.size()) * heads_, choose_one);
    metadata_ = *a.metadata;
    // Rows that share pages choose differently.
    metadata_.row_order = metadata_.shared_pages = nullptr;
    metadata_.context_lens = lengths_.data();
    chosen_ = a;
    chosen_.metadata = &metadata_;
    chosen_.runs = runs_.data();
    chosen_.run_count = run_count_;
  }
  Choice(const Choice&) = delete;

  // Attention to what was chosen, as long as this object lives.
  const Attention& attention() const { return chosen_; }

  // The bytes of summaries that were read.
  int64_t bytes_read() const {
    int64_t pages = 0;
    for (const Row& row : rows_) pages += row.pages;
    return pages * heads_ * RUNS_OF_PAGE * summary_bytes(a_.k_dim);
  }

 private:
  // A row that is not read whole, and its full pages before the one that is being written.
  struct Row {
    int row, pages;
  };

  const Attention& a_;
  const Kernels& kernels_;
  int heads_, run_count_;
  std::vector<Row> rows_;
  std::vector<int32_t> lengths_, runs_;
  std::vector<float> scores_;  // [rows, heads, gqa_group_size + 1, stride_]; the last are their weights
  int stride_ = 0;
  PagedKvMetadata metadata_;
  Attention chosen_;

  // A row whose query is padding has nothing to choose.
  static bool is_chosen(const PagedKvMetadata& metadata, int row, int read_tokens) {
    return metadata.context_lens[row] > read_tokens && !metadata.right_padding[row];
  }

  int full_pages(int row) const { return (a_.metadata->context_lens[row] - 1) / PAGE_SIZE; }

  float* scores_of(int row, int head) {
    return scores_.data() + (static_cast<size_t>(row) * heads_ + head) * (a_.gqa_group_size + 1) * stride_;
  }

  void score() {
    struct Part {
      int row, head, first;
    };
    std::vector<Part> parts;
    for (int i = 0; i < static_cast<int>(rows_.size()); i++) {
      stride_ = std::max(stride_, padded(rows_[i].pages * RUNS_OF_PAGE));
      for (int head = 0; head < heads_; head++)
        for (int first = 0; first < rows_[i].pages; first += SCORED_PAGES) parts.push_back({i, head, first});
    }
    scores_.resize(rows_.size() * heads_ * (a_.gqa_group_size + 1) * stride_);
    auto score_one = [&](int i) {
      const Part& part = parts[i];
      const Row& row = rows_[part.row];
      int end = std::min(row.pages, part.first + SCORED_PAGES);
      kernels_.score_runs(a_, row.row, part.head, part.first, end, scores_of(part.row, part.head), stride_);
    };
    parallel_for(static_cast<int>(parts.size()), score_one);
  }

  void choose(int i, int head) {
    const Row& row = rows_[i];
    float *scores = scores_of(i, head), *weights = scores + a_.gqa_group_size * stride_;
    kernels_.weigh_runs(scores, a_.gqa_group_size, stride_, row.pages * RUNS_OF_PAGE, weights);
    int length = a_.metadata->context_lens[row.row], last = (length - 1) / RUN_TOKENS;
    int latest = std::min(row.pages * RUNS_OF_PAGE, last - LATEST_RUNS), free = run_count_ - 1 - (last - latest + 1);
    std::vector<int32_t> others(latest - 1);
    std::iota(others.begin(), others.end(), 1);
    std::nth_element(others.begin(), others.begin() + free, others.end(), [&](int32_t a, int32_t b) {
      return weights[a] > weights[b] || (weights[a] == weights[b] && a < b);
    });
    std::sort(others.begin(), others.begin() + free);
    int32_t* runs = runs_.data() + (static_cast<size_t>(row.row) * heads_ + head) * run_count_;
    runs[0] = 0;
    std::copy(others.begin(), others.begin() + free, runs + 1);
    std::iota(runs + 1 + free, runs + run_count_, latest);
    if (!head) lengths_[row.row] = (run_count_ - 1) * RUN_TOKENS + (length - 1) % RUN_TOKENS + 1;
  }
};

}  // namespace paged_kv
