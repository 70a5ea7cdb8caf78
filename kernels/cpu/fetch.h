// Prefetches the memory that a thread reads next while it computes.
#pragma once

#include "attention.h"

namespace {

using namespace paged_kv;

constexpr int LINE = 64;  // bytes of a cache line
// Scores of one query row. Keys go through in steps that may end behind the last one.
constexpr int SCORES = PAGE_SIZE + LANES;
// Between 32 and 256 makes no difference of more than 5 % at 32,768 tokens, in neither direction.
constexpr int VALUE_TOKENS = 64;

// Tokens that are to be read soon.
struct Next {
  RowRun run;
  int count, dim;
};

// The i-th of so many shares of a run that is to be read soon.
INLINE Next share_of(RowRun run, int count, int dim, int i, int shares) {
  int first = count * i / shares;
  run.data += first * run.stride;
  if (is_quantised(run.format)) run.scales += first * scale_words(run.format, dim) * sizeof(uint16_t);
  return {run, count * (i + 1) / shares - first, dim};
}

// Fetches the rows of a run into the second-level cache, spread evenly over the steps of a loop:
// all at once they would take the place of the loop's own loads. Scales come first; they are few.
class Fetch {
 public:
  Fetch(const Next& next, int steps) : at_(next.run.data), left_(0), step_(0) {
    if (!next.count || steps <= 0) return;
    if (is_quantised(next.run.format)) {
      ptrdiff_t bytes = (ptrdiff_t)next.count * scale_words(next.run.format, next.dim) * sizeof(uint16_t);
      for (ptrdiff_t i = 0; i < bytes; i += LINE) __builtin_prefetch(next.run.scales + i, 0, 2);
    }
    left_ = next.count * next.run.stride;
    step_ = (left_ + steps * LINE - 1) / (steps * LINE) * LINE;
  }

  __attribute__((always_inline)) void step() {
    if (left_ <= 0) return;
    for (ptrdiff_t i = 0; i < step_; i += LINE) __builtin_prefetch(at_ + i, 0, 2);
    at_ += step_;
    left_ -= step_;
  }

 private:
  const char* at_;
  ptrdiff_t left_, step_;
};

}  // namespace
