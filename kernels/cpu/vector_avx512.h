// 16 floats in a register of AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define HAS_BYTE_PRODUCTS 1  // `byte_keys.h` is for this instruction set
#ifdef __AVX512BF16__
#define HAS_BF16_PRODUCTS 1  // and `bf16_pairs.h` too
#else
#define HAS_BF16_PRODUCTS 0
#endif

namespace {

constexpr int W = 16;
constexpr int ACCUMULATORS = 16;   // of the 32 registers
// Of scores: with 24, 8 query rows take 0.9 of the time of 16, which load queries more often.
constexpr int SCORE_ACCUMULATORS = 24;
constexpr int MAX_GROUP = 8;       // query rows that share one pass over keys
constexpr int TILE_ROWS = 6;       // register tile of a matrix product, 6 x 4 vectors
constexpr int TILE_VECTORS = 4;

typedef __m512 vec;

INLINE vec zero() { return _mm512_setzero_ps(); }
INLINE vec set1(float x) { return _mm512_set1_ps(x); }
INLINE vec load(const float* p) { return _mm512_loadu_ps(p); }
// Otherwise the compiler may load it again for each use, and load units are the bottleneck.
INLINE void keep_in_register(vec& x) {
#ifdef __AVX512F__  // tests emulate it where it is missing
  __asm__("" : "+v"(x));
#else
  (void)x;
#endif
}
INLINE void store(float* p, vec x) { _mm512_storeu_ps(p, x); }
INLINE vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec round_to_int(vec x) { return _mm512_roundscale_ps(x, 0); }
INLINE vec floor(vec x) { return _mm512_roundscale_ps(x, 1); }
INLINE vec times_power_of_2(vec x, vec n) { return _mm512_scalef_ps(x, n); }
INLINE float reduce_add(vec x) { return _mm512_reduce_add_ps(x); }
INLINE float reduce_max(vec x) { return _mm512_reduce_max_ps(x); }

// Lane i is lane i ^ H of x.
template <int H>
INLINE vec swap_lanes(vec x) {
  if (H == 1) return _mm512_permute_ps(x, 0xb1);
  if (H == 2) return _mm512_permute_ps(x, 0x4e);
  return H == 4 ? _mm512_shuffle_f32x4(x, x, 0xb1) : _mm512_shuffle_f32x4(x, x, 0x4e);
}

// x where low <= at < high, else the other.
INLINE vec between(vec at, vec low, vec high, vec x, vec other) {
  __mmask16 inside = _mm512_cmp_ps_mask(low, at, _CMP_LE_OQ) & _mm512_cmp_ps_mask(at, high, _CMP_LT_OQ);
  return _mm512_mask_blend_ps(inside, other, x);
}

// HALF: only the lower 8, and zeros above.
template <bool HALF>
INLINE __m256i load_16_bit(const uint16_t* p) {
  if (HALF) return _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return _mm256_loadu_si256((const __m256i*)p);
}
template <bool HALF>
INLINE void store_16_bit(uint16_t* p, __m256i x) {
  if (HALF) _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(x));
  else _mm256_storeu_si256((__m256i*)p, x);
}
template <bool HALF>
INLINE vec load_f32(const float* p) {
  return HALF ? _mm512_maskz_loadu_ps(0x00ff, p) : _mm512_loadu_ps(p);
}
template <bool HALF>
INLINE vec load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(load_16_bit<HALF>(p));
}
template <bool HALF>
INLINE vec load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16_bit<HALF>(p)), 16));
}
template <bool HALF>
INLINE void store_f32(float* p, vec x) {
  _mm512_mask_storeu_ps(p, HALF ? 0x00ff : 0xffff, x);
}
template <bool HALF>
INLINE void store_f16(uint16_t* p, vec x) {
  store_16_bit<HALF>(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
template <bool HALF>
INLINE void store_bf16(uint16_t* p, vec x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  store_16_bit<HALF>(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

INLINE float float_of_f16(uint16_t x) { return _cvtsh_ss(x); }
INLINE uint16_t f16_of_float(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

typedef __m512i words;

INLINE words load_words(const char* p) { return _mm512_loadu_si512(p); }
// `count` words, and zeros.
INLINE words load_words(const char* p, int count) {
  return _mm512_maskz_loadu_epi32((__mmask16)((1 << count) - 1), p);
}
INLINE words word1(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE words bit_and(words a, words b) { return _mm512_and_si512(a, b); }
INLINE words bit_xor(words a, words b) { return _mm512_xor_si512(a, b); }
INLINE words shifted_right(words x, int bits) { return _mm512_srli_epi32(x, bits); }
INLINE words shifted_left(words x, int bits) { return _mm512_slli_epi32(x, bits); }
INLINE vec floats_of(words x) { return _mm512_cvtepi32_ps(x); }  // of 31 bits
// The words of fifth bits of four groups, shifted by the place of each word of codes in its group.
INLINE words load_fifths(const uint16_t* p) {
  words bits = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p));
  bits = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), bits);
  return _mm512_srlv_epi32(bits, _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3));
}
// Scales for groups of so many words; only the first `count` of them exist.
template <int WORDS>
INLINE vec spread(const float* scales, int count) {
  vec x = set1(scales[0]);
  for (int i = 1; i < W / WORDS; i++)
    x = _mm512_mask_blend_ps((__mmask16)(0xffff << i * WORDS), x, set1(scales[i < count ? i : 0]));
  return x;
}

// Signed bytes as floats.
INLINE vec load_bytes(const char* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// Whole numbers as bytes, signed or not.
INLINE void store_bytes(char* p, vec x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
// Bytes as words.
INLINE words load_byte_words(const char* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}

INLINE vec sum_pairs(vec a, vec b) {
  return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}
INLINE vec sum_fours(vec a, vec b) {
  __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
INLINE vec sum_blocks(vec a, vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
INLINE vec sums_of_four(const vec* x) {
  return sum_fours(sum_pairs(x[0], x[1]), sum_pairs(x[2], x[3]));
}
// sums[i] is the sum of the lanes of x[i], for 16 or 24 of these.
template <int COUNT>
INLINE void sum_lanes(const vec* x, float* sums) {
  vec first = sum_blocks(sums_of_four(x), sums_of_four(x + 4));
  store(sums, sum_blocks(first, sum_blocks(sums_of_four(x + 8), sums_of_four(x + 12))));
  if (COUNT == 16) return;
  vec last = sum_blocks(sums_of_four(x + 16), sums_of_four(x + 20));
  _mm512_mask_storeu_ps(sums + 16, 0x00ff, sum_blocks(last, last));
}

// The products of unsigned with signed bytes, added up in twos to 16 bits.
INLINE words byte_products(words codes, words numbers) {
  return _mm512_maddubs_epi16(codes, numbers);
}
INLINE words add_16_bit(words a, words b) { return _mm512_add_epi16(a, b); }
INLINE words sub_words(words a, words b) { return _mm512_sub_epi32(a, b); }
// Of 4 registers of 16-bit numbers: word r of each 4 is the sum of the 8 numbers there in x[r]. Sums
// of 2 fit in 16 bits.
INLINE words sum_eights(const words* x) {
  words ab = add_16_bit(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
  words cd = add_16_bit(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
  words one = _mm512_set1_epi16(1);
  return _mm512_add_epi32(_mm512_madd_epi16(_mm512_unpacklo_epi64(ab, cd), one),
                          _mm512_madd_epi16(_mm512_unpackhi_epi64(ab, cd), one));
}
// sums[4 * r + i] is the sum of the lanes r, r + 4 and so on of x[i], for 4 of each.
INLINE void sum_every_fourth(const vec* x, float* sums) {
  vec low[] = {_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1])};
  vec high[] = {_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3])};
  vec rows[4];
  for (int r = 0; r < 4; r++) {
    __m512d a = _mm512_castps_pd(low[r / 2]), b = _mm512_castps_pd(high[r / 2]);
    rows[r] = _mm512_castpd_ps(r % 2 ? _mm512_unpackhi_pd(a, b) : _mm512_unpacklo_pd(a, b));
  }
  store(sums, sum_blocks(sum_blocks(rows[0], rows[1]), sum_blocks(rows[2], rows[3])));
}

#if HAS_BF16_PRODUCTS
// The products of bfloat16 numbers, added up in twos and to the sums.
INLINE vec add_paired_products(vec sums, words x, words y) {
  return _mm512_dpbf16_ps(sums, (__m512bh)x, (__m512bh)y);
}
// Numbers of two rows in pairs: those of the lower halves of each 128 bits, and of the upper halves.
INLINE words paired_low(words x, words y) { return _mm512_unpacklo_epi16(x, y); }
INLINE words paired_high(words x, words y) { return _mm512_unpackhi_epi16(x, y); }
// 32 floats in the order of these pairs, and back.
INLINE vec low_of_pairs(vec first, vec second) {
  const __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  return _mm512_permutex2var_ps(first, at, second);
}
INLINE vec high_of_pairs(vec first, vec second) {
  const __m512i at = _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  return _mm512_permutex2var_ps(first, at, second);
}
INLINE vec first_of_pairs(vec low, vec high) {
  const __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  return _mm512_permutex2var_ps(low, at, high);
}
INLINE vec second_of_pairs(vec low, vec high) {
  const __m512i at = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  return _mm512_permutex2var_ps(low, at, high);
}
#endif

}  // namespace
