// 8 floats in a register of AVX2, with FMA and F16C.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define HAS_BYTE_PRODUCTS 1  // `byte_keys.h` is for this instruction set
#define HAS_BF16_PRODUCTS 0

namespace {

constexpr int W = 8;
constexpr int ACCUMULATORS = 12;  // of the 16 registers
constexpr int SCORE_ACCUMULATORS = ACCUMULATORS;
constexpr int MAX_GROUP = 4;     // query rows that share one pass over keys
constexpr int TILE_ROWS = 6;     // register tile of a matrix product, 6 x 2 vectors
constexpr int TILE_VECTORS = 2;

typedef __m256 vec;

INLINE vec zero() { return _mm256_setzero_ps(); }
INLINE vec set1(float x) { return _mm256_set1_ps(x); }
INLINE vec load(const float* p) { return _mm256_loadu_ps(p); }
// Otherwise the compiler may load it again for each use, and load units are the bottleneck.
INLINE void keep_in_register(vec& x) { __asm__("" : "+x"(x)); }
INLINE void store(float* p, vec x) { _mm256_storeu_ps(p, x); }
INLINE vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
INLINE vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec min(vec a, vec b) { return _mm256_min_ps(a, b); }
INLINE vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec round_to_int(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE vec floor(vec x) { return _mm256_floor_ps(x); }
// n is whole; at -127 and below the result is 0.
INLINE vec times_power_of_2(vec x, vec n) {
  __m256i e = _mm256_cvtps_epi32(_mm256_max_ps(n, _mm256_set1_ps(-127.f)));
  e = _mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
INLINE float reduce_add(vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float reduce_max(vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// Lane i is lane i ^ H of x.
template <int H>
INLINE vec swap_lanes(vec x) {
  if (H == 4) return _mm256_permute2f128_ps(x, x, 1);
  return H == 1 ? _mm256_permute_ps(x, 0xb1) : _mm256_permute_ps(x, 0x4e);
}

// x where low <= at < high, else the other.
INLINE vec between(vec at, vec low, vec high, vec x, vec other) {
  vec inside = _mm256_and_ps(_mm256_cmp_ps(low, at, _CMP_LE_OQ), _mm256_cmp_ps(at, high, _CMP_LT_OQ));
  return _mm256_blendv_ps(other, x, inside);
}

// Sizes are multiples of 8, so there are no halves to load.
template <bool HALF>
INLINE vec load_f32(const float* p) {
  return _mm256_loadu_ps(p);
}
template <bool HALF>
INLINE vec load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
template <bool HALF>
INLINE vec load_bf16(const uint16_t* p) {
  __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
template <bool HALF>
INLINE void store_f32(float* p, vec x) {
  _mm256_storeu_ps(p, x);
}
template <bool HALF>
INLINE void store_f16(uint16_t* p, vec x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
template <bool HALF>
INLINE void store_bf16(uint16_t* p, vec x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
  rounded = _mm256_srli_epi32(rounded, 16);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(rounded),
                                                 _mm256_extracti128_si256(rounded, 1)));
}

INLINE float float_of_f16(uint16_t x) { return _cvtsh_ss(x); }
INLINE uint16_t f16_of_float(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

typedef __m256i words;

INLINE words load_words(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
// Half of a register, and zeros.
INLINE words load_words(const char* p, int) {
  return _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p));
}
INLINE words word1(uint32_t x) { return _mm256_set1_epi32((int)x); }
INLINE words bit_and(words a, words b) { return _mm256_and_si256(a, b); }
INLINE words bit_xor(words a, words b) { return _mm256_xor_si256(a, b); }
INLINE words shifted_right(words x, int bits) { return _mm256_srli_epi32(x, bits); }
INLINE words shifted_left(words x, int bits) { return _mm256_slli_epi32(x, bits); }
INLINE vec floats_of(words x) { return _mm256_cvtepi32_ps(x); }  // of 31 bits
// The words of fifth bits of two groups, shifted by the place of each word of codes in its group.
INLINE words load_fifths(const uint16_t* p) {
  words bits = _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i*)p));
  bits = _mm256_permutevar8x32_epi32(bits, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
  return _mm256_srlv_epi32(bits, _mm256_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3));
}
// Scales for groups of so many words; only the first `count` of them exist.
template <int WORDS>
INLINE vec spread(const float* scales, int count) {
  if (WORDS == W) return set1(scales[0]);
  return _mm256_blend_ps(set1(scales[0]), set1(scales[count > 1]), 0xf0);
}

// Signed bytes as floats.
INLINE vec load_bytes(const char* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// Whole numbers as bytes, signed or not.
INLINE void store_bytes(char* p, vec x) {
  const __m256i first = _mm256_set1_epi32(0x0c080400);
  __m256i bytes = _mm256_shuffle_epi8(_mm256_cvtps_epi32(x), first);
  _mm_storel_epi64((__m128i*)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes),
                                                   _mm256_extracti128_si256(bytes, 1)));
}
// Bytes as words.
INLINE words load_byte_words(const char* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}

INLINE vec sum_fours(const vec* x) {
  return _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
}
// sums[i] is the sum of the lanes of x[i].
template <int COUNT>
INLINE void sum_lanes(const vec* x, float* sums) {
  for (int i = 0; i < COUNT; i += 4) {
    vec s = sum_fours(x + i);
    _mm_storeu_ps(sums + i, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
  }
}

// The products of unsigned with signed bytes, added up in twos to 16 bits.
INLINE words byte_products(words codes, words numbers) {
  return _mm256_maddubs_epi16(codes, numbers);
}
INLINE words add_16_bit(words a, words b) { return _mm256_add_epi16(a, b); }
INLINE words sub_words(words a, words b) { return _mm256_sub_epi32(a, b); }
// Of 4 registers of 16-bit numbers: word r of each 4 is the sum of the 8 numbers there in x[r]. Sums
// of 2 fit in 16 bits.
INLINE words sum_eights(const words* x) {
  words ab = add_16_bit(_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[0], x[1]));
  words cd = add_16_bit(_mm256_unpacklo_epi32(x[2], x[3]), _mm256_unpackhi_epi32(x[2], x[3]));
  words one = _mm256_set1_epi16(1);
  return _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi64(ab, cd), one),
                          _mm256_madd_epi16(_mm256_unpackhi_epi64(ab, cd), one));
}
// sums[4 * r + i] is the sum of the lanes r, r + 4 and so on of x[i], for 4 of each.
INLINE void sum_every_fourth(const vec* x, float* sums) {
  vec low[] = {_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1])};
  vec high[] = {_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3])};
  for (int r = 0; r < 4; r++) {
    __m256d a = _mm256_castps_pd(low[r / 2]), b = _mm256_castps_pd(high[r / 2]);
    vec row = _mm256_castpd_ps(r % 2 ? _mm256_unpackhi_pd(a, b) : _mm256_unpacklo_pd(a, b));
    _mm_storeu_ps(sums + 4 * r,
                  _mm_add_ps(_mm256_castps256_ps128(row), _mm256_extractf128_ps(row, 1)));
  }
}

}  // namespace
