// Codes of groups of 32 numbers, as kernels/number_format.py defines them.
//
// A row goes through in passes over its groups: what one group needs is known late, after sums and
// divisions, and a machine that waits for it has the other groups to go on with.
#pragma once

#include "attention.h"

namespace {

using namespace paged_kv;

constexpr float LEAST = 1.17549435e-38f;  // the smallest float of full precision
constexpr float GRID = 2048.f;            // steps of the largest number of a group
constexpr float REACHES[] = {8.f, 8.5f, 7.25f};
constexpr int CHOICES = sizeof REACHES / sizeof *REACHES;

// A number for each group of a row, and for what fills the last vector.
struct PerGroup {
  alignas(64) float at[(LONGEST_HEAD / GROUP + LANES - 1) / LANES * LANES];

  // Nothing in the lanes behind the last group.
  void pad(int groups) {
    for (int i = groups; i % W; i++) at[i] = 0.f;
  }
};

INLINE vec negative(vec x) { return sub(zero(), x); }
INLINE vec clipped(vec x, float low, float high) { return min(max(x, set1(low)), set1(high)); }

// The largest numbers of a row's groups, and the largest of what is below 0, without its sign.
INLINE void find_largest(const float* row, int groups, PerGroup& above, PerGroup& below) {
  for (int i = 0; i < groups; i++, row += GROUP) {
    vec high = load(row), low = negative(load(row));
#pragma GCC unroll 8
    for (int j = W; j < GROUP; j += W) {
      high = max(load(row + j), high);
      low = max(negative(load(row + j)), low);
    }
    above.at[i] = reduce_max(high);
    below.at[i] = reduce_max(low);
  }
  above.pad(groups);
  below.pad(groups);
}

// 0 for a group of nothing that float16 could hold, whose codes are all 0.
INLINE vec inverse_of(vec scale) {
  vec magnitude = max(scale, negative(scale));
  return between(magnitude, set1(LEAST), set1(INFINITY), div(set1(1.f), scale), zero());
}

// Puts the codes of a row at `to`, and the scales of its groups into `scales`: by FORMAT.
template <int FORMAT>
void quantise(const float* row, int groups, char* to, PerGroup& scales);

template <>
inline void quantise<PAGED_KV_Q8>(const float* row, int groups, char* to, PerGroup& scales) {
  PerGroup above, below, inverses;
  find_largest(row, groups, above, below);
  for (int i = 0; i < groups; i += W) {
    vec scale = div(max(load(above.at + i), load(below.at + i)), set1(127.f));
    store(scales.at + i, scale);
    store(inverses.at + i, inverse_of(scale));
  }
  for (int i = 0; i < groups; i++)
    for (int j = i * GROUP; j < (i + 1) * GROUP; j += W) {
      vec code = floor(add(mul(load(row + j), set1(inverses.at[i])), set1(0.5f)));
      store_bytes(to + j, clipped(code, -127.f, 127.f));
    }
}

INLINE vec steps_of(vec x, vec inverse) { return round_to_int(mul(x, inverse)); }

// The codes of whole numbers of steps, with reach / GRID.
INLINE vec code_of(vec steps, vec reach) {
  return clipped(round_to_int(mul(steps, reach)), -8.f, 7.f);
}

// For each choice the sums of code * steps and, behind those of all choices, of code * code. They are
// sums of whole numbers, and exact.
INLINE void sum_choices(const float* row, int groups, const PerGroup& inverses, PerGroup* sums) {
  for (int i = 0; i < groups; i++, row += GROUP) {
    vec inverse = set1(inverses.at[i]), steps[GROUP / W], sums_of[ACCUMULATORS];
    alignas(64) float summed[ACCUMULATORS];
#pragma GCC unroll 8
    for (int j = 0; j < GROUP / W; j++) steps[j] = steps_of(load(row + j * W), inverse);
#pragma GCC unroll 32
    for (int j = 0; j < ACCUMULATORS; j++) sums_of[j] = zero();
#pragma GCC unroll 4
    for (int choice = 0; choice < CHOICES; choice++)
#pragma GCC unroll 8
      for (int j = 0; j < GROUP / W; j++) {
        vec code = code_of(steps[j], set1(REACHES[choice] / GRID));
        sums_of[choice] = fma(code, steps[j], sums_of[choice]);
        sums_of[CHOICES + choice] = fma(code, code, sums_of[CHOICES + choice]);
      }
    sum_lanes(sums_of, summed);
#pragma GCC unroll 8
    for (int j = 0; j < 2 * CHOICES; j++) sums[j].at[i] = summed[j];
  }
  for (int j = 0; j < 2 * CHOICES; j++) sums[j].pad(groups);
}

// The reach that leaves the least error, over GRID, and the best scale for its codes.
INLINE void choose(int groups, const PerGroup* sums, const PerGroup& grids, PerGroup& reaches,
                   PerGroup& scales) {
  for (int i = 0; i < groups; i += W) {
    vec most = zero(), reach = zero(), scale = zero();
#pragma GCC unroll 4
    for (int choice = 0; choice < CHOICES; choice++) {
      vec products = load(sums[choice].at + i);
      vec squares = max(load(sums[CHOICES + choice].at + i), set1(1.f));
      vec gain = div(mul(products, products), squares);
      reach = between(most, zero(), gain, set1(REACHES[choice] / GRID), reach);
      scale = between(most, zero(), gain, div(products, squares), scale);
      most = max(gain, most);
    }
    store(reaches.at + i, reach);
    store(scales.at + i, mul(scale, load(grids.at + i)));
  }
}

template <>
inline void quantise<PAGED_KV_Q4>(const float* row, int groups, char* to, PerGroup& scales) {
  PerGroup above, below, grids, inverses, sums[2 * CHOICES], reaches;
  find_largest(row, groups, above, below);
  for (int i = 0; i < groups; i += W) {
    vec high = load(above.at + i), low = load(below.at + i);
    vec largest = between(low, set1(-INFINITY), high, high, negative(low));
    vec grid = div(largest, set1(-GRID));
    store(grids.at + i, grid);
    store(inverses.at + i, inverse_of(grid));
  }
  sum_choices(row, groups, inverses, sums);
  choose(groups, sums, grids, reaches, scales);
  for (int i = 0; i < groups; i++, row += GROUP, to += GROUP / 2) {
    vec inverse = set1(inverses.at[i]), reach = set1(reaches.at[i]);
    for (int j = 0; j < GROUP / 2; j += W) {
      vec low = code_of(steps_of(load(row + j), inverse), reach);
      vec high = code_of(steps_of(load(row + GROUP / 2 + j), inverse), reach);
      store_bytes(to + j, add(fma(high, set1(16.f), low), set1(8.f * 17.f)));
    }
  }
}

}  // namespace
