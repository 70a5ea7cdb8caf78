// The products of a few query rows with quantised rows, whose numbers never leave the registers.
//
// Both are nearly as fast as the multiplications with queries and weights allow, which are of floats;
// `byte_keys.h` has others for keys. Codes are taken as they stand, without their sign; what they have
// above their middle is subtracted from sums.
#pragma once

#include "fetch.h"
#include "row_coding.h"

namespace {

// A row's codes lie in words of 32 bits, PER_WORD in each and WORDS of those to a group. Where a word has
// 8, the lower halves of its bytes are the first numbers.
template <int FORMAT>
struct Codes {
  static constexpr int BITS = FORMAT == PAGED_KV_Q8 ? 8 : FORMAT == PAGED_KV_Q5 ? 5 : 4;
  static constexpr int PER_WORD = BITS == 8 ? 4 : 8, WORDS = GROUP / PER_WORD;
  static constexpr int MIDDLE = 1 << (BITS - 1);

  // Which number of a row is the i-th code of a word.
  static constexpr int number(int word, int i) {
    return word / WORDS * GROUP + word % WORDS * 4 + i % 4 + i / 4 * (GROUP / 2);
  }
  // The power of two by which `in_place` multiplies the i-th codes, because it does not shift them.
  static constexpr float factor(int i) { return i % 4 == 3 ? 1.f : (float)(1u << 8 * (i % 4)); }
  INLINE vec in_place(const words* bytes, int i) {
    if (i % 4 == 3) return floats_of(shifted_right(bytes[i / 4], 24));
    return floats_of(bit_and(bytes[i / 4], word1(0xffu << 8 * (i % 4))));
  }
  // A register of keys' words as bytes without a sign, from word `at` of a row with `count` more words on.
  template <bool PART>
  INLINE void load_keys(const char* row, const uint16_t* fifths, int at, int count, words* bytes) {
    words x = PART ? load_words(row + at * 4, count) : load_words(row + at * 4);
    if constexpr (BITS == 8) {
      bytes[0] = bit_xor(x, word1(0x80808080));
    } else {
      words bits = load_fifths(fifths + at / 2);  // more than the row has: the page goes on
      bytes[0] = bit_xor(bit_and(x, word1(0x0f0f0f0f)), shifted_left(bit_and(bits, word1(0x01010101)), 4));
      bytes[1] = bit_xor(bit_and(shifted_right(x, 4), word1(0x0f0f0f0f)), bit_and(bits, word1(0x10101010)));
    }
  }
  // Numbers i and i + 16 of a group, from i = `at` on.
  INLINE void load_pair(const char* group, int at, vec& first, vec& second) {
    if (BITS == 8) {
      first = load_bytes(group + at);
      second = load_bytes(group + GROUP / 2 + at);
    } else {
      words x = load_byte_words(group + at);
      first = floats_of(bit_and(x, word1(15)));
      second = floats_of(shifted_right(x, 4));
    }
  }
};

// A query row arranged for keys of a format: for each register of words a vector of initial sums,
// then a vector for each code of a word. So each lane of a register stays within one group, and is
// scaled once for all codes of a word.
template <int FORMAT>
INLINE int arranged(int dim) {
  typedef Codes<FORMAT> C;
  return (dim / GROUP * C::WORDS + W - 1) / W * (C::PER_WORD + 1) * W;
}

template <int FORMAT>
void arrange(const float* q, int dim, float* to) {
  typedef Codes<FORMAT> C;
  for (int word = 0; word < dim / GROUP * C::WORDS; word += W, to += (C::PER_WORD + 1) * W)
    for (int lane = 0; lane < W; lane++) {
      float sum = 0.f;
      for (int i = 0; i < C::PER_WORD; i++) {
        int number = C::number(word + lane, i);
        float x = number < dim ? q[number] : 0.f;
        to[(i + 1) * W + lane] = x / C::factor(i);
        sum += x;
      }
      to[lane] = -C::MIDDLE * sum;
    }
}

constexpr int QUERY_FLOATS = LONGEST_HEAD / 4 * 5 + LANES;  // at least what any row takes

// The scales of `count` tokens, which follow each other, as floats.
INLINE void read_scales(const uint16_t* from, int count, float* to) {
  int i = 0;
  for (; i + W <= count; i += W) store(to + i, load_f16<false>(from + i));
  for (; i < count; i++) to[i] = float_of_f16(from[i]);
}

// The scales of keys as floats [count, per_token]: one for each 32 numbers, or each 128.
template <int FORMAT>
struct KeyScales {
  int shared, per_token;

  KeyScales(const RowRun& keys, int count, int dim, float* to)
      : shared((1 << scale_shift(FORMAT, dim)) / GROUP), per_token(shared == 4 ? dim / 128 : dim / GROUP) {
    const uint16_t* from = scales_of(keys, 0, dim);
    int repeat = shared == 2, stride = scale_words(FORMAT, dim);
    if (FORMAT == PAGED_KV_Q8) read_scales(from, count * per_token, to);
    else
      for (int t = 0; t < count; t++, from += stride)
        for (int i = 0; i < per_token; i++) *to++ = float_of_f16(from[i >> repeat]);
  }

  // Of a register of codes from a group of 32 on, `count` of which the row has.
  __attribute__((always_inline)) vec at(const float* token, int group, int count) const {
    if (FORMAT == PAGED_KV_Q5 && shared == 4) return set1(token[group / 4]);
    return spread<GROUP / (FORMAT == PAGED_KV_Q8 ? 4 : 8)>(token + group, count);
  }
};

// [count, scales] to [scales, VALUE_TOKENS], with zeros behind the last of each.
INLINE void transpose_scales(const float* from, int count, int scales, float* to) {
  for (int t = 0; t < count; t++)
    for (int i = 0; i < scales; i++) to[i * VALUE_TOKENS + t] = from[t * scales + i];
  for (int t = count; t % W; t++)
    for (int i = 0; i < scales; i++) to[i * VALUE_TOKENS + t] = 0.f;
}

// scores[g * SCORES + t] of G arranged query rows [G, QUERY_FLOATS] with `count` keys.
template <int FORMAT, int G>
void multiply_group_keys(const RowRun& keys, int count, int dim, const float* q, float* scales,
                         float* scores, const Next& next) {
  typedef Codes<FORMAT> C;
  // Rows that share the loads of queries.
  constexpr int R = clamped((ACCUMULATORS - 2) / (G + 1), 1, 4);
  int groups = dim / GROUP, slot_words = groups * C::WORDS, stride = scale_words(FORMAT, dim);
  KeyScales<FORMAT> of_keys(keys, count, dim, scales);
  Fetch fetch(next, (count + R - 1) / R);
  alignas(64) float sums[ACCUMULATORS];
  for (int t = 0; t < count; t += R) {
    vec total[ACCUMULATORS];
#pragma GCC unroll 16
    for (int i = 0; i < ACCUMULATORS; i++) total[i] = zero();
    const char* row[R];
    const uint16_t* fifths[R];
    const float* scale[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      int token = smaller(t + r, count - 1);
      row[r] = keys.data + token * keys.stride;
      fifths[r] = (const uint16_t*)keys.scales + token * stride;
      scale[r] = scales + token * of_keys.per_token;
    }
    fetch.step();
    auto step = [&](auto part, int word) __attribute__((always_inline)) {
      constexpr bool PART = decltype(part)::value;
      const float* x = q + word * (C::PER_WORD + 1);
      int group = word / C::WORDS;
      words codes[R][C::PER_WORD / 4];
      vec acc[G * R];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        C::template load_keys<PART>(row[r], fifths[r], word, slot_words - word, codes[r]);
#pragma GCC unroll 16
      for (int g = 0; g < G; g++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[g * R + r] = load(x + g * QUERY_FLOATS);
#pragma GCC unroll 16
      for (int i = 0; i < C::PER_WORD; i++) {
        vec k[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) k[r] = C::in_place(codes[r], i);
#pragma GCC unroll 16
        for (int g = 0; g < G; g++) {
          vec y = load(x + g * QUERY_FLOATS + (i + 1) * W);
          keep_in_register(y);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) acc[g * R + r] = fma(k[r], y, acc[g * R + r]);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        vec by = of_keys.at(scale[r], group, PART ? groups - group : W);
#pragma GCC unroll 16
        for (int g = 0; g < G; g++) total[g * R + r] = fma(acc[g * R + r], by, total[g * R + r]);
      }
    };
    int word = 0;
    if (slot_words == 2 * W) {  // 128 numbers, the most frequent size, of 5 bits in 8 lanes
      step(Constant<false>(), 0);
      step(Constant<false>(), W);
    } else {
      for (; word + W <= slot_words; word += W) step(Constant<false>(), word);
      if (word < slot_words) step(Constant<true>(), word);
    }
    sum_lanes<ACCUMULATORS>(total, sums);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) scores[g * SCORES + t + r] = sums[g * R + r];
  }
}

// Multiplies weights [G, SCORES] of `count` values of a group by their scales, to [G, VALUE_TOKENS];
// and computes the sum of these times the middle of codes.
template <int FORMAT, int G>
INLINE void scale_weights(const float* weights, const float* scales, int count, float* scaled,
                          float* middle) {
  vec sums[G];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) sums[g] = zero();
  for (int t = 0; t < count; t += W) {
    vec scale = load(scales + t);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      vec weight = mul(scale, load(weights + g * SCORES + t));
      store(scaled + g * VALUE_TOKENS + t, weight);
      sums[g] = add(sums[g], weight);
    }
  }
  if (FORMAT == PAGED_KV_Q4)
    for (int g = 0; g < G; g++) middle[g] = Codes<FORMAT>::MIDDLE * reduce_add(sums[g]);
}

// Two vectors of one group of the sums over `count` values.
template <int FORMAT, int G>
INLINE void multiply_pair(const char* group, int at, ptrdiff_t row, int count, const float* scaled,
                          const float* middle, const float* rescale, float* out, int stride,
                          Fetch& fetch) {
  vec first[G], second[G];
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) {
    vec shrink = set1(rescale ? rescale[g] : 1.f);
    first[g] = mul(shrink, load(out + g * stride + at));
    second[g] = mul(shrink, load(out + g * stride + GROUP / 2 + at));
  }
  fetch.step();
#pragma GCC unroll 4
  for (int t = 0; t < count; t++) {
    vec x, y;
    Codes<FORMAT>::load_pair(group + t * row, at, x, y);
#pragma GCC unroll 16
    for (int g = 0; g < G; g++) {
      vec weight = set1(scaled[g * VALUE_TOKENS + t]);
      first[g] = fma(weight, x, first[g]);
      second[g] = fma(weight, y, second[g]);
    }
  }
#pragma GCC unroll 16
  for (int g = 0; g < G; g++) {
    vec low = FORMAT == PAGED_KV_Q4 ? set1(middle[g]) : zero();
    store(out + g * stride + at, sub(first[g], low));
    store(out + g * stride + GROUP / 2 + at, sub(second[g], low));
  }
}

// out [G, stride] becomes rescale[g] * out + weights @ values.
template <int FORMAT, int G>
void multiply_group_values(const RowRun& values, int count, int dim, float* scales,
                           const float* weights, const float* rescale, float* out, int stride,
                           const Next& next) {
  int groups = dim / GROUP, bytes = (int)(values.stride / groups);
  Fetch fetch(next, (count + VALUE_TOKENS - 1) / VALUE_TOKENS * groups * (GROUP / 2 / W));
  int per_token = dim >> scale_shift(FORMAT, dim), shared = groups / per_token;
  float* by_group = scales + PAGE_SIZE * groups;
  read_scales(scales_of(values, 0, dim), count * per_token, scales);
  for (int t = 0; t < count; t += VALUE_TOKENS) {
    int tokens = smaller(VALUE_TOKENS, count - t);
    const float* of_tile = scales + t * per_token;
    constexpr int FREQUENT = 128 >> scale_shift(FORMAT, 128);
    if (per_token == FREQUENT) transpose_scales(of_tile, tokens, FREQUENT, by_group);
    else transpose_scales(of_tile, tokens, per_token, by_group);
    alignas(64) float scaled[LONGEST_HEAD / GROUP][G * VALUE_TOKENS], middle[LONGEST_HEAD / GROUP][G];
    for (int i = 0; i < per_token; i++)
      scale_weights<FORMAT, G>(weights + t, by_group + i * VALUE_TOKENS, tokens, scaled[i], middle[i]);
    for (int group = 0; group < groups; group++)
      for (int at = 0; at < GROUP / 2; at += W)
        multiply_pair<FORMAT, G>(values.data + t * values.stride + group * bytes, at, values.stride,
                                 tokens, scaled[group / shared], middle[group / shared], rescale,
                                 out + group * GROUP, stride, fetch);
    rescale = nullptr;
  }
}

}  // namespace
