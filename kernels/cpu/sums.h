// Weighted sums of values, in the basis of those that were added last.
#pragma once

#include "rotation.h"

namespace {

INLINE int query_rows(const Attention& a, const QueryBlock& block) {
  return block.queries * a.gqa_group_size;
}

INLINE int query_rows(const Attention& a, const QueryBlock* blocks, int count) {
  const QueryBlock& last = blocks[count - 1];
  return last.first_row + query_rows(a, last) - blocks->first_row;
}

// The softmax of a task's query rows. Each block is in a basis of its own: what others read does not
// change its sums.
class Sums {
 public:
  // Begins with zeros, in the plain basis.
  Sums(const Attention& a, const Task& task) : a_(a), task_(task) {
    int rows = query_rows(a, task.blocks, task.block_count);
    for (int r = 0; r < rows; r++) task.part.maximum[r] = LOWEST, task.part.sum[r] = 0.f;
    memset(task.part.values, 0, sizeof(float) * rows * padded(a.v_dim));
  }

  // Those of a span's rows.
  SplitPartial of(const Span& span) const {
    int first = task_.blocks[span.first].first_row;
    const SplitPartial& part = task_.part;
    return {part.maximum + first, part.sum + first, part.values + (size_t)first * padded(a_.v_dim)};
  }

  // Sums of rotated values are the rotated sums, so that both can be added up in one place.
  void set_basis(const Span& span, bool rotated) {
    for (int i = span.first; i < span.first + span.count; i++) {
      if (rotated == rotated_[i]) continue;
      const QueryBlock& block = task_.blocks[i];
      for (int r = block.first_row; r < block.first_row + query_rows(a_, block); r++)
        rotate(task_.part.values + (size_t)r * padded(a_.v_dim), a_.v_dim);
      rotated_[i] = rotated;
    }
  }

  void set_plain_basis() { set_basis({0, task_.block_count, 0, 0}, false); }

 private:
  const Attention& a_;
  const Task& task_;
  bool rotated_[MOST_ROWS] = {};
};

// The bytes of a run's page that are read, but for the centre, which is read once for all tokens.
INLINE int64_t page_bytes(const KeyRun& run, int k_dim, int v_dim) {
  if (!run.in_page) return 0;
  int scales = scale_words(run.keys.format, k_dim) + scale_words(run.values.format, v_dim);
  return (run.keys.stride + run.values.stride + scales * (int64_t)sizeof(uint16_t)) * run.count;
}

}  // namespace
