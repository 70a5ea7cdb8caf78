// Weighted sums of values, in the basis of those that were added last.
#pragma once

#include "rotation.h"

namespace {

class Sums {
 public:
  // Begins with zeros, in the plain basis. `rows` is the number of used rows of a part's values.
  Sums(const SplitPartial& part, int rows, int dim) : part_(part), rows_(rows), dim_(dim) {
    memset(part.values, 0, sizeof(float) * rows * padded(dim));
  }

  // Sums of rotated values are the rotated sums, so that both can be added up in one place.
  void set_basis(bool rotated) {
    if (rotated == rotated_) return;
    for (int r = 0; r < rows_; r++) rotate(part_.values + (size_t)r * padded(dim_), dim_);
    rotated_ = rotated;
  }

 private:
  const SplitPartial& part_;
  int rows_, dim_;
  bool rotated_ = false;
};

}  // namespace
