// The products of a few query rows of 16 bits with keys of 5 bits, in whole numbers.
//
// A query is first put into the codes of Q8, bytes and a scale for each group. An instruction then
// multiplies 32 or 64 of them with codes, where floats go by 8 or 16 and codes must be made floats.
// The noise that this adds to outputs is 0.1 of that of keys of 5 bits themselves. Queries of
// float32, from which more is expected, are multiplied as floats.
#pragma once

#include "multiply_groups.h"
#include "quantisation.h"

namespace {

constexpr int REGISTER_GROUPS = W / 4;  // groups of keys that fill a register
constexpr int REGISTERS = (LONGEST_HEAD / GROUP + REGISTER_GROUPS - 1) / REGISTER_GROUPS;

// A query row: for each register of codes the bytes for their lower bits, then those for the upper.
struct ByteRow {
  char bytes[REGISTERS][2][W * 4];
  float scales[REGISTERS * REGISTER_GROUPS];
  int32_t middles[REGISTERS * REGISTER_GROUPS];  // what codes have above their middle, in bytes
};
static_assert(sizeof(ByteRow) <= QUERY_FLOATS * sizeof(float), "a query's place holds it");

// Codes of numbers that are not finite mean nothing. The product with the centre of keys tells of these.
void arrange_bytes(const float* q, int dim, ByteRow* to) {
  int groups = dim / GROUP;
  char codes[LONGEST_HEAD];
  PerGroup scales;
  quantise<PAGED_KV_Q8>(q, groups, 1, codes, nullptr, scales);
  *to = {};
  for (int i = 0; i < groups; i++) {
    int sum = 0;
    for (int j = 0; j < GROUP; j++) {
      char code = codes[i * GROUP + j];
      int place = i % REGISTER_GROUPS * (GROUP / 2) + j % (GROUP / 2);
      to->bytes[i / REGISTER_GROUPS][j / (GROUP / 2)][place] = code;
      sum += (signed char)code;
    }
    to->scales[i] = scales.at[i];
    to->middles[i] = Codes<PAGED_KV_Q5>::MIDDLE * sum;
  }
}

// Up to 4 query rows, with their scales and middles arranged by the lanes of their products.
struct FourRows {
  const ByteRow* rows[4];
  alignas(64) float scales[REGISTERS * W];
  alignas(64) int32_t middles[REGISTERS * W];

  void fill(const float* q, int count, int groups) {
    int lanes = (groups + REGISTER_GROUPS - 1) / REGISTER_GROUPS * W;
    for (int r = 0; r < 4; r++) {
      rows[r] = r < count ? (const ByteRow*)(q + r * QUERY_FLOATS) : nullptr;
      for (int i = r; i < lanes; i += 4) {
        scales[i] = rows[r] ? rows[r]->scales[i / 4] : 0.f;
        middles[i] = rows[r] ? rows[r]->middles[i / 4] : 0;
      }
    }
  }
};

// scores[g * SCORES + t] of G query rows, a ByteRow in each of [G, QUERY_FLOATS], with `count` keys.
template <int G>
void multiply_byte_keys(const RowRun& keys, int count, int dim, const float* q, float* scales,
                        float* scores, const Next& next);

#if HAS_BYTE_PRODUCTS

// The products of a register of codes, the index-th of its row, with the first `count` query rows:
// word r of each 4 is the product of query row r with the group of codes at that place.
INLINE words multiply_codes(const words* codes, const FourRows& four, int count, int index) {
  words products[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) {
    products[r] = word1(0);
    if (r >= count) continue;
    const auto& bytes = four.rows[r]->bytes[index];
    products[r] = add_16_bit(byte_products(codes[0], load_words(bytes[0])),
                             byte_products(codes[1], load_words(bytes[1])));
  }
  return sub_words(sum_eights(products), load_words((const char*)(four.middles + index * W)));
}

template <int G>
void multiply_byte_keys(const RowRun& keys, int count, int dim, const float* q, float* scales,
                        float* scores, const Next& next) {
  constexpr int TOKENS = 4, FOURS = (G + 3) / 4;
  int groups = dim / GROUP, slot_words = groups * Codes<PAGED_KV_Q5>::WORDS;
  int stride = scale_words(PAGED_KV_Q5, dim);
  KeyScales<PAGED_KV_Q5> of_keys(keys, count, dim, scales);
  FourRows fours[FOURS];
  for (int i = 0; i < FOURS; i++) fours[i].fill(q + 4 * i * QUERY_FLOATS, smaller(4, G - 4 * i), groups);
  Fetch fetch(next, (count + TOKENS - 1) / TOKENS);
  for (int t = 0; t < count; t += TOKENS) {
    vec total[FOURS][TOKENS];
    fetch.step();
#pragma GCC unroll 4
    for (int i = 0; i < TOKENS; i++) {
      int token = smaller(t + i, count - 1);
      const char* row = keys.data + token * keys.stride;
      const uint16_t* fifths = (const uint16_t*)keys.scales + token * stride;
      const float* scale = scales + token * of_keys.per_token;
#pragma GCC unroll 2
      for (int j = 0; j < FOURS; j++) total[j][i] = zero();
      auto step = [&](auto part, int word) __attribute__((always_inline)) {
        constexpr bool PART = decltype(part)::value;
        words codes[2];
        Codes<PAGED_KV_Q5>::load_keys<PART>(row, fifths, word, slot_words - word, codes);
        int group = word / Codes<PAGED_KV_Q5>::WORDS;
        vec by = of_keys.at(scale, group, PART ? groups - group : W);
#pragma GCC unroll 2
        for (int j = 0; j < FOURS; j++) {
          vec sums = floats_of(multiply_codes(codes, fours[j], G - 4 * j, word / W));
          total[j][i] = fma(sums, mul(load(fours[j].scales + word), by), total[j][i]);
        }
      };
      int word = 0;
      if (slot_words == 16) {  // 128 numbers, the most frequent size
        step(Constant<false>(), 0);
        if (W == 8) step(Constant<false>(), W);
      } else {
        for (; word + W <= slot_words; word += W) step(Constant<false>(), word);
        if (word < slot_words) step(Constant<true>(), word);
      }
    }
    alignas(64) float sums[4 * TOKENS];
#pragma GCC unroll 2
    for (int j = 0; j < FOURS; j++) {
      sum_every_fourth(total[j], sums);
      for (int g = 4 * j; g < smaller(G, 4 * j + 4); g++)
        memcpy(scores + g * SCORES + t, sums + g % 4 * TOKENS, TOKENS * sizeof(float));
    }
  }
}

#endif

}  // namespace
