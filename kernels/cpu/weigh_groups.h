// The weighted sums of quantised values for a few query rows.
//
// Codes of 8 bits are summed as floats. Codes of 4 bits are summed two tokens at a time, with weights
// of 16 bits: sums of so many tokens are exact, and what is lost is half of 1 / 32767 of the largest
// weight times the largest scale among them.
#pragma once

#include "arranged_queries.h"
#include "multiply_groups.h"

namespace {

// [count, groups] to [groups, VALUE_TOKENS], with zeros behind the last of each.
INLINE void transpose_scales(const float* from, int count, int groups, float* to) {
  for (int t = 0; t < count; t++)
    for (int i = 0; i < groups; i++) to[i * VALUE_TOKENS + t] = from[t * groups + i];
  for (int t = count; t % W; t++)
    for (int i = 0; i < groups; i++) to[i * VALUE_TOKENS + t] = 0.f;
}

// Weights of `count` values of a group, [G, SCORES] times the scales, to [G, VALUE_TOKENS].
template <int G>
INLINE void scale_weights(const float* weights, const float* scales, int count, float* scaled) {
  for (int t = 0; t < count; t += W) {
    vec scale = load(scales + t);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++)
      store(scaled + g * VALUE_TOKENS + t, mul(scale, load(weights + g * SCORES + t)));
  }
}

// Two vectors of one group of the sums over `count` values.
template <int G>
INLINE void weigh_bytes_at(const char* group, int at, ptrdiff_t row, int count, const float* scaled,
                           const float* decay, float* out, int stride, Fetch& fetch) {
  vec first[G], second[G];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) {
    vec shrink = set1(decay ? decay[g] : 1.f);
    first[g] = mul(shrink, load(out + g * stride + at));
    second[g] = mul(shrink, load(out + g * stride + GROUP / 2 + at));
  }
  fetch.step();
#pragma GCC unroll 4
  for (int t = 0; t < count; t++) {
    vec x = load_bytes(group + t * row + at), y = load_bytes(group + t * row + GROUP / 2 + at);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      vec weight = set1(scaled[g * VALUE_TOKENS + t]);
      first[g] = fma(weight, x, first[g]);
      second[g] = fma(weight, y, second[g]);
    }
  }
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) {
    store(out + g * stride + at, first[g]);
    store(out + g * stride + GROUP / 2 + at, second[g]);
  }
}

// The weights of a tile of `count` values, [G, SCORES], as parts of the largest of a query row.
template <int G>
struct TileWeights {
  alignas(64) float parts[G * VALUE_TOKENS];
  float largest[G];

  TileWeights(const float* weights, int count) {
    for (int g = 0; g < G; g++, weights += SCORES) {
      vec most = zero();
      for (int t = 0; t < count; t += W) most = max(load(weights + t), most);
      largest[g] = reduce_max(most);
      vec inverse = set1(largest[g] > 0.f ? LARGEST_I16 / largest[g] : 0.f);
      for (int t = 0; t < count; t += W)
        store(parts + g * VALUE_TOKENS + t, mul(load(weights + t), inverse));
    }
  }
};

// The weights of a tile times the scales of one group, as whole numbers of steps.
template <int G>
struct GroupWeights {
  alignas(64) uint32_t pairs[G * VALUE_TOKENS / 2];  // of tokens
  float step[G];
  int32_t begin[G];  // minus the middle of codes times the sum of weights

  __attribute__((always_inline)) GroupWeights(const TileWeights<G>& tile, const float* scales, int count) {
    vec most = zero(), sums[G];
    for (int t = 0; t < count; t += W)
      most = max(max(load(scales + t), sub(zero(), load(scales + t))), most);
    float largest = reduce_max(most);
    vec inverse = set1(largest > 0.f ? 1.f / largest : 0.f);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) sums[g] = zero();
    for (int t = 0; t < count; t += W) {
      vec part = mul(load(scales + t), inverse);
#pragma GCC unroll 16
      for (int g = 0; g < G; g++) {
        vec weight = round_to_int(mul(part, load(tile.parts + g * VALUE_TOKENS + t)));
        store_halves((char*)pairs + 2 * (g * VALUE_TOKENS + t), weight);
        sums[g] = add(sums[g], weight);
      }
    }
    for (int g = 0; g < G; g++) {
      step[g] = tile.largest[g] * largest / LARGEST_I16;
      begin[g] = -8 * (int32_t)reduce_add(sums[g]);
    }
  }
};

template <int G>
INLINE void weigh_nibbles_at(const char* group, int at, ptrdiff_t row, int count,
                             const GroupWeights<G>& weights, const float* decay, float* out,
                             int stride, Fetch& fetch) {
  words first[G], second[G];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) first[g] = second[g] = word1(weights.begin[g]);
  fetch.step();
  const uint32_t* pairs = weights.pairs;
  auto add = [&](const char* one, const char* other) __attribute__((always_inline)) {
    words x = load_byte_pairs(one, other);
    words low = both(x, word1(0x000f000f)), high = both(shifted_right(x, 4), word1(0x000f000f));
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      words weight = word1(pairs[g * (VALUE_TOKENS / 2)]);
      first[g] = add_pairs(first[g], low, weight);
      second[g] = add_pairs(second[g], high, weight);
    }
  };
  group += at;
  for (const uint32_t* end = pairs + count / 2; pairs < end; pairs++, group += 2 * row)
    add(group, group + row);
  if (count % 2) add(group, group);  // the weight of the second is 0
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) {
    vec shrink = set1(decay ? decay[g] : 1.f), step = set1(weights.step[g]);
    for (int half = 0; half < 2; half++) {
      float* to = out + g * stride + half * (GROUP / 2) + at;
      store(to, fma(floats_of(half ? second[g] : first[g]), step, mul(shrink, load(to))));
    }
  }
}

// A tile of at most VALUE_TOKENS values; scales [groups, VALUE_TOKENS].
template <int FORMAT, int G>
INLINE void weigh_tile(const RowRun& values, int count, int groups, const float* scales,
                       const float* weights, const float* decay, float* out, int stride,
                       Fetch& fetch) {
  ptrdiff_t bytes = values.stride / groups;
  if constexpr (FORMAT == PAGED_KV_Q4) {
    TileWeights<G> tile(weights, count);
    for (int i = 0; i < groups; i++) {
      GroupWeights<G> of_group(tile, scales + i * VALUE_TOKENS, count);
      for (int at = 0; at < GROUP / 2; at += W)
        weigh_nibbles_at<G>(values.data + i * bytes, at, values.stride, count, of_group, decay,
                            out + i * GROUP, stride, fetch);
    }
  } else {
    alignas(64) float scaled[LONGEST_HEAD / GROUP][G * VALUE_TOKENS];
    for (int i = 0; i < groups; i++)
      scale_weights<G>(weights, scales + i * VALUE_TOKENS, count, scaled[i]);
    for (int i = 0; i < groups; i++)
      for (int at = 0; at < GROUP / 2; at += W)
        weigh_bytes_at<G>(values.data + i * bytes, at, values.stride, count, scaled[i], decay,
                          out + i * GROUP, stride, fetch);
  }
}

// out [G, stride] becomes decay[g] * out + weights @ values.
template <int FORMAT, int G>
void weigh_groups(const RowRun& values, int count, int dim, float* scales,
                  const float* weights, const float* decay, float* out, int stride,
                  const Next& next) {
  int groups = dim / GROUP;
  Fetch fetch(next, (count + VALUE_TOKENS - 1) / VALUE_TOKENS * groups * (GROUP / 2 / W));
  float* by_group = scales + PAGE_SIZE * groups;
  read_scales(values, count, groups, scales);
  for (int t = 0; t < count; t += VALUE_TOKENS) {
    int tokens = smaller(VALUE_TOKENS, count - t);
    const float* of_tile = scales + t * groups;
    if (groups == 4) transpose_scales(of_tile, tokens, 4, by_group);  // 128, the most frequent size
    else transpose_scales(of_tile, tokens, groups, by_group);
    RowRun tile = values;
    tile.data += t * values.stride;
    weigh_tile<FORMAT, G>(tile, tokens, groups, by_group, weights + t, decay, out, stride, fetch);
    decay = nullptr;
  }
}

}  // namespace
