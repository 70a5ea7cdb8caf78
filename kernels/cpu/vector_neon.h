// 4 floats in a register of NEON, as every 64-bit ARM has it.
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define HAS_BYTE_PRODUCTS 0
#define HAS_BF16_PRODUCTS 0

namespace {

constexpr int W = 4;
constexpr int ACCUMULATORS = 16;  // of the 32 registers
constexpr int SCORE_ACCUMULATORS = ACCUMULATORS;
constexpr int MAX_GROUP = 8;      // query rows that share one pass over keys
constexpr int TILE_ROWS = 6;      // register tile of a matrix product, 6 x 4 vectors
constexpr int TILE_VECTORS = 4;

typedef float32x4_t vec;

INLINE vec zero() { return vdupq_n_f32(0.f); }
INLINE vec set1(float x) { return vdupq_n_f32(x); }
INLINE vec load(const float* p) { return vld1q_f32(p); }
// Otherwise the compiler may load it again for each use, and load units are the bottleneck.
INLINE void keep_in_register(vec& x) { __asm__("" : "+w"(x)); }
INLINE void store(float* p, vec x) { vst1q_f32(p, x); }
INLINE vec add(vec a, vec b) { return vaddq_f32(a, b); }
INLINE vec sub(vec a, vec b) { return vsubq_f32(a, b); }
INLINE vec mul(vec a, vec b) { return vmulq_f32(a, b); }
INLINE vec div(vec a, vec b) { return vdivq_f32(a, b); }
INLINE vec max(vec a, vec b) { return vmaxq_f32(a, b); }
INLINE vec min(vec a, vec b) { return vminq_f32(a, b); }
INLINE vec fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
INLINE vec round_to_int(vec x) { return vrndnq_f32(x); }
INLINE vec floor(vec x) { return vrndmq_f32(x); }
// n is whole; at -127 and below the result is 0.
INLINE vec times_power_of_2(vec x, vec n) {
  int32x4_t e = vcvtq_s32_f32(vmaxq_f32(n, vdupq_n_f32(-127.f)));
  return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23)));
}
INLINE float reduce_add(vec x) { return vaddvq_f32(x); }
INLINE float reduce_max(vec x) { return vmaxvq_f32(x); }

// Lane i is lane i ^ H of x.
template <int H>
INLINE vec swap_lanes(vec x) {
  return H == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
}

// x where low <= at < high, else the other.
INLINE vec between(vec at, vec low, vec high, vec x, vec other) {
  return vbslq_f32(vandq_u32(vcleq_f32(low, at), vcltq_f32(at, high)), x, other);
}

// Sizes are multiples of 8, so there are no halves to load.
template <bool HALF>
INLINE vec load_f32(const float* p) {
  return vld1q_f32(p);
}
template <bool HALF>
INLINE vec load_f16(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
template <bool HALF>
INLINE vec load_bf16(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
template <bool HALF>
INLINE void store_f32(float* p, vec x) {
  vst1q_f32(p, x);
}
template <bool HALF>
INLINE void store_f16(uint16_t* p, vec x) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
template <bool HALF>
INLINE void store_bf16(uint16_t* p, vec x) {
  uint32x4_t bits = vreinterpretq_u32_f32(x);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  rounded = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
  vst1_u16(p, vshrn_n_u32(rounded, 16));
}

INLINE float float_of_f16(uint16_t x) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0); }
INLINE uint16_t f16_of_float(float x) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0); }

typedef uint32x4_t words;

INLINE words load_words(const char* p) { return vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)p)); }
// Groups fill registers, so there are no parts of one to load.
INLINE words load_words(const char* p, int) { return load_words(p); }
INLINE words word1(uint32_t x) { return vdupq_n_u32(x); }
INLINE words bit_and(words a, words b) { return vandq_u32(a, b); }
INLINE words bit_xor(words a, words b) { return veorq_u32(a, b); }
INLINE words shifted_right(words x, int bits) { return vshlq_u32(x, vdupq_n_s32(-bits)); }
INLINE words shifted_left(words x, int bits) { return vshlq_u32(x, vdupq_n_s32(bits)); }
INLINE vec floats_of(words x) { return vcvtq_f32_u32(x); }
// A group's word of fifth bits, shifted by the place of each word of codes in the group.
INLINE words load_fifths(const uint16_t* p) {
  uint32_t bits;
  memcpy(&bits, p, sizeof bits);
  const int32_t places[] = {0, -1, -2, -3};
  return vshlq_u32(word1(bits), vld1q_s32(places));
}
// A register has words of one group only.
template <int WORDS>
INLINE vec spread(const float* scales, int) {
  return set1(scales[0]);
}

INLINE uint8x8_t load_4_bytes(const char* p) {
  uint32_t bytes;
  memcpy(&bytes, p, sizeof bytes);
  return vreinterpret_u8_u32(vdup_n_u32(bytes));
}
// Signed bytes as floats.
INLINE vec load_bytes(const char* p) {
  int16x8_t x = vmovl_s8(vreinterpret_s8_u8(load_4_bytes(p)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)));
}
// Whole numbers as bytes, signed or not.
INLINE void store_bytes(char* p, vec x) {
  int16x4_t halves = vmovn_s32(vcvtq_s32_f32(x));
  vst1_lane_s32((int32_t*)p, vreinterpret_s32_s8(vmovn_s16(vcombine_s16(halves, halves))), 0);
}
// Bytes as words.
INLINE words load_byte_words(const char* p) {
  return vmovl_u16(vget_low_u16(vmovl_u8(load_4_bytes(p))));
}

// sums[i] is the sum of the lanes of x[i].
template <int COUNT>
INLINE void sum_lanes(const vec* x, float* sums) {
  for (int i = 0; i < COUNT; i += 4)
    store(sums + i, vpaddq_f32(vpaddq_f32(x[i], x[i + 1]), vpaddq_f32(x[i + 2], x[i + 3])));
}

}  // namespace
