// Stands for the compiler's own header: the AVX-512 intrinsics that the kernels use, as Intel's
// guide defines them, in plain C++. A machine without AVX-512 can so test those kernels, slowly.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t __mmask16;
struct __m512 {
  float x[16];
};
struct __m512d {
  double x[8];
};
struct __m512i {
  uint32_t x[16];
};
struct __m256i {
  uint16_t x[16];
};
struct __m128i {
  uint16_t x[8];
};
enum { _MM_FROUND_TO_NEAREST_INT = 0, _CMP_LT_OQ = 17, _CMP_LE_OQ = 18, _CMP_UNORD_Q = 3 };

template <class To, class From>
To _cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast keeps all bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
template <class Register, class Lane>
Register _lanes(Lane lane) {
  Register result;
  for (unsigned i = 0; i < sizeof result.x / sizeof *result.x; i++) result.x[i] = lane(i);
  return result;
}
template <class Register>
Register _read(const void* p) {
  Register result;
  memcpy(&result, p, sizeof result);
  return result;
}

inline __m512 _mm512_set1_ps(float a) { return _lanes<__m512>([&](int) { return a; }); }
inline __m512 _mm512_setzero_ps() { return _mm512_set1_ps(0.f); }
inline __m512i _mm512_set1_epi32(int a) { return _lanes<__m512i>([&](int) { return a; }); }
inline __m512 _mm512_loadu_ps(const void* p) { return _read<__m512>(p); }
inline void _mm512_storeu_ps(void* p, __m512 a) { memcpy(p, &a, sizeof a); }
inline __m512 _mm512_maskz_loadu_ps(__mmask16 k, const void* p) {
  __m512 a = _mm512_setzero_ps();
  for (int i = 0; i < 16; i++)
    if (k >> i & 1) memcpy(a.x + i, (const float*)p + i, sizeof(float));
  return a;
}
inline void _mm512_mask_storeu_ps(void* p, __mmask16 k, __m512 a) {
  for (int i = 0; i < 16; i++)
    if (k >> i & 1) memcpy((float*)p + i, a.x + i, sizeof(float));
}
inline __m256i _mm256_loadu_si256(const __m256i* p) { return _read<__m256i>(p); }
inline __m128i _mm_loadu_si128(const __m128i* p) { return _read<__m128i>(p); }
inline void _mm256_storeu_si256(__m256i* p, __m256i a) { memcpy(p, &a, sizeof a); }
inline void _mm_storeu_si128(__m128i* p, __m128i a) { memcpy(p, &a, sizeof a); }
inline __m256i _mm256_zextsi128_si256(__m128i a) {
  return _lanes<__m256i>([&](int i) { return i < 8 ? a.x[i] : 0; });
}
inline __m128i _mm256_castsi256_si128(__m256i a) {
  return _lanes<__m128i>([&](int i) { return a.x[i]; });
}
inline __m512i _mm512_castps_si512(__m512 a) { return _cast<__m512i>(a); }
inline __m512 _mm512_castsi512_ps(__m512i a) { return _cast<__m512>(a); }
inline __m512d _mm512_castps_pd(__m512 a) { return _cast<__m512d>(a); }
inline __m512 _mm512_castpd_ps(__m512d a) { return _cast<__m512>(a); }

#define EACH(name, Register, expression) \
  inline Register name(Register a, Register b) { \
    return _lanes<Register>([&](int i) { return expression; }); \
  }
EACH(_mm512_add_ps, __m512, a.x[i] + b.x[i])
EACH(_mm512_sub_ps, __m512, a.x[i] - b.x[i])
EACH(_mm512_mul_ps, __m512, a.x[i] * b.x[i])
EACH(_mm512_div_ps, __m512, a.x[i] / b.x[i])
EACH(_mm512_min_ps, __m512, a.x[i] < b.x[i] ? a.x[i] : b.x[i])
EACH(_mm512_max_ps, __m512, a.x[i] > b.x[i] ? a.x[i] : b.x[i])  // the second where one is NaN
EACH(_mm512_scalef_ps, __m512, ldexpf(a.x[i], (int)fmaxf(floorf(b.x[i]), -300.f)))
EACH(_mm512_add_epi32, __m512i, a.x[i] + b.x[i])
EACH(_mm512_sub_epi32, __m512i, a.x[i] - b.x[i])
EACH(_mm512_and_si512, __m512i, a.x[i] & b.x[i])
EACH(_mm512_xor_si512, __m512i, a.x[i] ^ b.x[i])
// Within each quarter of 4 floats, or of 2 doubles.
EACH(_mm512_unpacklo_ps, __m512, (i % 2 ? b : a).x[i / 4 * 4 + i % 4 / 2])
EACH(_mm512_unpackhi_ps, __m512, (i % 2 ? b : a).x[i / 4 * 4 + 2 + i % 4 / 2])
EACH(_mm512_unpacklo_epi32, __m512i, (i % 2 ? b : a).x[i / 4 * 4 + i % 4 / 2])
EACH(_mm512_unpackhi_epi32, __m512i, (i % 2 ? b : a).x[i / 4 * 4 + 2 + i % 4 / 2])
EACH(_mm512_unpacklo_epi64, __m512i, (i % 4 < 2 ? a : b).x[i / 4 * 4 + i % 2])
EACH(_mm512_unpackhi_epi64, __m512i, (i % 4 < 2 ? a : b).x[i / 4 * 4 + 2 + i % 2])
EACH(_mm512_unpacklo_pd, __m512d, (i % 2 ? b : a).x[i / 2 * 2])
EACH(_mm512_unpackhi_pd, __m512d, (i % 2 ? b : a).x[i / 2 * 2 + 1])
#undef EACH

// The halves of a word, and its bytes.
inline int32_t _half(uint32_t word, int i) { return (int16_t)(word >> 16 * i); }
inline int32_t _signed_byte(uint32_t word, int i) { return (int8_t)(word >> 8 * i); }
inline int32_t _byte(uint32_t word, int i) { return (uint8_t)(word >> 8 * i); }
template <class Half>
uint32_t _halves(Half half) {
  return (uint16_t)half(0) | (uint32_t)(uint16_t)half(1) << 16;
}
inline __m512i _mm512_set1_epi16(short a) {
  return _lanes<__m512i>([&](int) { return _halves([&](int) { return a; }); });
}
inline __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return _lanes<__m512i>([&](int i) {
    return _halves([&](int j) { return _half(a.x[i], j) + _half(b.x[i], j); });
  });
}
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  return _lanes<__m512i>([&](int i) {
    return _half(a.x[i], 0) * _half(b.x[i], 0) + _half(a.x[i], 1) * _half(b.x[i], 1);
  });
}
// Unsigned bytes of a with signed ones of b.
inline __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
  return _lanes<__m512i>([&](int i) {
    return _halves([&](int j) {
      int sum = _byte(a.x[i], 2 * j) * _signed_byte(b.x[i], 2 * j) +
                _byte(a.x[i], 2 * j + 1) * _signed_byte(b.x[i], 2 * j + 1);
      return sum < -32768 ? -32768 : sum > 32767 ? 32767 : sum;
    });
  });
}

inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return _lanes<__m512>([&](int i) { return fmaf(a.x[i], b.x[i], c.x[i]); });
}
// 0: to the nearest, 1: down.
inline __m512 _mm512_roundscale_ps(__m512 a, int how) {
  return _lanes<__m512>([&](int i) { return how ? floorf(a.x[i]) : nearbyintf(a.x[i]); });
}
// Lanes of each quarter, chosen by 2 bits each.
inline __m512 _mm512_permute_ps(__m512 a, int choice) {
  return _lanes<__m512>([&](int i) { return a.x[i / 4 * 4 + (choice >> i % 4 * 2 & 3)]; });
}
inline __m512i _mm512_loadu_si512(const void* p) { return _read<__m512i>(p); }
inline __m512i _mm512_maskz_loadu_epi32(__mmask16 k, const void* p) {
  return _cast<__m512i>(_mm512_maskz_loadu_ps(k, p));
}
inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  return _lanes<__m512>([&](int i) { return (float)(int32_t)a.x[i]; });
}
inline __m512i _mm512_cvtps_epi32(__m512 a) {
  return _lanes<__m512i>([&](int i) { return (uint32_t)(int32_t)nearbyintf(a.x[i]); });
}
inline __m128i _mm512_cvtepi32_epi8(__m512i a) {
  return _lanes<__m128i>([&](int i) { return (a.x[2 * i] & 255) | (a.x[2 * i + 1] & 255) << 8; });
}
inline __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return _lanes<__m512i>([&](int i) { return a.x[i / 2] >> i % 2 * 8 & 255; });
}
inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return _lanes<__m512i>([&](int i) { return (int8_t)(a.x[i / 2] >> i % 2 * 8); });
}
// Two quarters of a, then two of b, chosen by 2 bits each.
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int choice) {
  return _lanes<__m512>([&](int i) {
    return (i < 8 ? a : b).x[(choice >> (i / 4 * 2) & 3) * 4 + i % 4];
  });
}
inline __m512i _mm512_slli_epi32(__m512i a, int n) {
  return _lanes<__m512i>([&](int i) { return a.x[i] << n; });
}
inline __m512i _mm512_srlv_epi32(__m512i a, __m512i n) {
  return _lanes<__m512i>([&](int i) { return a.x[i] >> n.x[i]; });
}
inline __m512i _mm512_permutexvar_epi32(__m512i at, __m512i a) {
  return _lanes<__m512i>([&](int i) { return a.x[at.x[i] & 15]; });
}
// What is behind the 128 bits may be anything.
inline __m512i _mm512_castsi128_si512(__m128i a) {
  __m512i wide = _mm512_set1_epi32(0x5a5a5a5a);
  memcpy(&wide, &a, sizeof a);
  return wide;
}
inline __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k,
                                 int l, int m, int n, int o, int p) {
  return {uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d), uint32_t(e), uint32_t(f), uint32_t(g), uint32_t(h),
          uint32_t(i), uint32_t(j), uint32_t(k), uint32_t(l), uint32_t(m), uint32_t(n), uint32_t(o), uint32_t(p)};
}
inline __m512i _mm512_srli_epi32(__m512i a, int n) {
  return _lanes<__m512i>([&](int i) { return a.x[i] >> n; });
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return _lanes<__m512i>([&](int i) { return a.x[i]; });
}
inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  return _lanes<__m256i>([&](int i) { return a.x[i]; });
}
inline __m512i _mm512_mask_mov_epi32(__m512i a, __mmask16 k, __m512i b) {
  return _lanes<__m512i>([&](int i) { return (k >> i & 1 ? b : a).x[i]; });
}
inline __m512 _mm512_mask_blend_ps(__mmask16 k, __m512 a, __m512 b) {
  return _lanes<__m512>([&](int i) { return (k >> i & 1 ? b : a).x[i]; });
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  unsigned mask = 0;
  for (int i = 0; i < 16; i++) {
    float x = a.x[i], y = b.x[i];
    bool holds = predicate == _CMP_LT_OQ   ? x < y
                 : predicate == _CMP_LE_OQ ? x <= y
                                           : isnan(x) || isnan(y);
    mask |= (unsigned)holds << i;
  }
  return (__mmask16)mask;
}
inline float _mm512_reduce_add_ps(__m512 a) {
  float sum = 0.f;
  for (float x : a.x) sum += x;
  return sum;
}
inline float _mm512_reduce_max_ps(__m512 a) {
  float top = a.x[0];
  for (float x : a.x) top = x > top ? x : top;
  return top;
}

// GCC and Clang know the type on x86-64 from SSE2 on.
inline __m512 _mm512_cvtph_ps(__m256i a) {
  return _lanes<__m512>([&](int i) { return (float)_cast<_Float16>(a.x[i]); });
}
inline __m256i _mm512_cvtps_ph(__m512 a, int) {
  return _lanes<__m256i>([&](int i) { return _cast<uint16_t>((_Float16)a.x[i]); });
}
inline float _cvtsh_ss(uint16_t a) { return (float)_cast<_Float16>(a); }
inline uint16_t _cvtss_sh(float a, int) { return _cast<uint16_t>((_Float16)a); }
