// 4 floats in a vector of GCC's and Clang's extension: any machine, SSE2 on x86-64.
#pragma once

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define HAS_BYTE_PRODUCTS 0
#define HAS_BF16_PRODUCTS 0

namespace {

constexpr int W = 4;
constexpr int ACCUMULATORS = 8;
constexpr int SCORE_ACCUMULATORS = ACCUMULATORS;
constexpr int MAX_GROUP = 4;   // query rows that share one pass over keys
constexpr int TILE_ROWS = 6;   // register tile of a matrix product, 6 x 2 vectors
constexpr int TILE_VECTORS = 2;

typedef float vec __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));

template <class To, class From>
INLINE To bits_of(From x) {
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

INLINE vec zero() { return vec{}; }
INLINE vec set1(float x) { return vec{x, x, x, x}; }
INLINE ints int1(int32_t x) { return ints{x, x, x, x}; }
INLINE vec load(const float* p) {
  vec x;
  memcpy(&x, p, sizeof x);
  return x;
}
INLINE void keep_in_register(vec&) {}
INLINE void store(float* p, vec x) { memcpy(p, &x, sizeof x); }
INLINE vec add(vec a, vec b) { return a + b; }
INLINE vec sub(vec a, vec b) { return a - b; }
INLINE vec mul(vec a, vec b) { return a * b; }
INLINE vec div(vec a, vec b) { return a / b; }
INLINE vec fma(vec a, vec b, vec c) { return a * b + c; }
INLINE vec select(ints mask, vec a, vec b) {
  return bits_of<vec>((mask & bits_of<ints>(a)) | (~mask & bits_of<ints>(b)));
}
INLINE vec max(vec a, vec b) { return select(a > b, a, b); }
INLINE vec min(vec a, vec b) { return select(a < b, a, b); }
// Adding this moves the fraction out of the float. What is larger than its precision is whole.
INLINE vec round_to_int(vec x) {
  const vec magic = set1(12582912.f);
  return select(x < set1(-4194304.f), x, (x + magic) - magic);
}
INLINE vec floor(vec x) {
  vec n = round_to_int(x);
  return select(n > x, n - set1(1.f), n);
}
// n is whole; at -127 and below the result is 0.
INLINE vec times_power_of_2(vec x, vec n) {
  ints e = __builtin_convertvector(max(n, set1(-127.f)), ints);
  return x * bits_of<vec>((e + 127) << 23);
}
INLINE float reduce_add(vec x) { return (x[0] + x[1]) + (x[2] + x[3]); }
INLINE float reduce_max(vec x) {
  float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}

// Lane i is lane i ^ H of x.
template <int H>
INLINE vec swap_lanes(vec x) {
  return H == 1 ? vec{x[1], x[0], x[3], x[2]} : vec{x[2], x[3], x[0], x[1]};
}

// x where low <= at < high, else the other.
INLINE vec between(vec at, vec low, vec high, vec x, vec other) {
  return select((low <= at) & (at < high), x, other);
}

INLINE ints load_16_bit(const uint16_t* p) { return ints{p[0], p[1], p[2], p[3]}; }

// Sizes are multiples of 8, so there are no halves to load.
template <bool HALF>
INLINE vec load_f32(const float* p) {
  return load(p);
}
// The exponent is too small by 112 when a float16's bits are moved up, also for subnormal numbers.
// Infinity and NaN, 31 in float16, get the float's largest exponent.
template <bool HALF>
INLINE vec load_f16(const uint16_t* p) {
  ints h = load_16_bit(p);
  ints magnitude = (h & 0x7fff) << 13;
  vec scaled = bits_of<vec>(magnitude) * set1(0x1p112f);
  ints special = (magnitude >= int1(31 << 23)) & 0x7f800000;
  ints sign = (h >> 15) * int1(INT32_MIN);
  return bits_of<vec>(bits_of<ints>(scaled) | special | sign);
}
template <bool HALF>
INLINE vec load_bf16(const uint16_t* p) {
  typedef uint32_t words __attribute__((vector_size(16)));
  return bits_of<vec>(words{p[0], p[1], p[2], p[3]} << 16);
}
template <bool HALF>
INLINE void store_f32(float* p, vec x) {
  store(p, x);
}
// To nearest, ties to even.
INLINE uint16_t f16_of(float x) {
  uint32_t bits = bits_of<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to 65536 or more
  if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 leaves multiples of 2^-24 in the float's last bits.
    float shifted = bits_of<float>(magnitude) + 0.5f;
    return (uint16_t)(sign | (bits_of<uint32_t>(shifted) - 0x3f000000));
  }
  uint32_t odd = magnitude >> 13 & 1;
  return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}
template <bool HALF>
INLINE void store_f16(uint16_t* p, vec x) {
  for (int i = 0; i < W; i++) p[i] = f16_of(x[i]);
}
template <bool HALF>
INLINE void store_bf16(uint16_t* p, vec x) {
  for (int i = 0; i < W; i++) {
    uint32_t bits = bits_of<uint32_t>((float)x[i]);
    bool nan = (bits & 0x7fffffff) > 0x7f800000;
    p[i] = nan ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

INLINE float float_of_f16(uint16_t x) {
  const uint16_t lanes[W] = {x};
  return load_f16<false>(lanes)[0];
}
INLINE uint16_t f16_of_float(float x) { return f16_of(x); }

typedef uint32_t words __attribute__((vector_size(16)));

INLINE words load_words(const char* p) {
  words x;
  memcpy(&x, p, sizeof x);
  return x;
}
// Groups fill registers, so there are no parts of one to load.
INLINE words load_words(const char* p, int) { return load_words(p); }
INLINE words word1(uint32_t x) { return words{x, x, x, x}; }
INLINE words bit_and(words a, words b) { return a & b; }
INLINE words bit_xor(words a, words b) { return a ^ b; }
INLINE words shifted_right(words x, int bits) { return x >> bits; }
INLINE words shifted_left(words x, int bits) { return x << bits; }
INLINE vec floats_of(words x) { return __builtin_convertvector(bits_of<ints>(x), vec); }  // of 31 bits
// A group's word of fifth bits, shifted by the place of each word of codes in the group.
INLINE words load_fifths(const uint16_t* p) {
  uint32_t bits;
  memcpy(&bits, p, sizeof bits);
  return word1(bits) >> words{0, 1, 2, 3};
}
// A register has words of one group only.
template <int WORDS>
INLINE vec spread(const float* scales, int) {
  return set1(scales[0]);
}

// Signed bytes as floats.
INLINE vec load_bytes(const char* p) {
  const signed char* x = (const signed char*)p;
  return __builtin_convertvector((ints{x[0], x[1], x[2], x[3]}), vec);
}
// Whole numbers as bytes, signed or not.
INLINE void store_bytes(char* p, vec x) {
  for (int i = 0; i < W; i++) p[i] = (char)(int)x[i];
}
// Bytes as words.
INLINE words load_byte_words(const char* p) {
  const uint8_t* x = (const uint8_t*)p;
  return words{x[0], x[1], x[2], x[3]};
}

// sums[i] is the sum of the lanes of x[i].
template <int COUNT>
INLINE void sum_lanes(const vec* x, float* sums) {
  for (int i = 0; i < COUNT; i++) sums[i] = reduce_add(x[i]);
}

}  // namespace
