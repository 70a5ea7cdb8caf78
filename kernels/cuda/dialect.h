// The words in which kernels/gpu is written, for CUDA. kernels/metal/dialect.h has the same. MLX
// compiles functions for the device where nothing else is said.

#define DEVICE
#define SHARED
#define THREAD
#define CONSTANT constexpr  // of the program
#define UNROLL _Pragma("unroll")

namespace paged_kv {

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;

CONSTANT uint ALL_LANES = 0xffffffffu;

inline float float_of_bits(uint bits) { return __uint_as_float(bits); }
inline float float_of_half(ushort bits) { return __half2float(__ushort_as_half(bits)); }
inline ushort half_of_float(float number) {
  return __half_as_ushort(__float2half_rn(number));
}

// Numbers of the model's dtype and their bits.
template <typename T>
inline float number_of(ushort bits);
template <>
inline float number_of<__half>(ushort bits) {
  return float_of_half(bits);
}
template <>
inline float number_of<__nv_bfloat16>(ushort bits) {
  return __uint_as_float(uint(bits) << 16);
}
inline ushort bits_of(__half number) { return __half_as_ushort(number); }
inline ushort bits_of(__nv_bfloat16 number) { return __bfloat16_as_ushort(number); }

// Never joined with a sum that follows: codes are rounded as on all backends.
inline float product(float a, float b) { return __fmul_rn(a, b); }

inline float power_of_2(float x) { return exp2f(x); }
inline float magnitude(float x) { return fabsf(x); }
inline float rounded_down(float x) { return floorf(x); }
inline float nearest(float x) { return rintf(x); }
inline float root(float x) { return sqrtf(x); }
inline float larger(float a, float b) { return fmaxf(a, b); }
inline float smaller(float a, float b) { return fminf(a, b); }
inline uint larger(uint a, uint b) { return a > b ? a : b; }
inline uint smaller(uint a, uint b) { return a < b ? a : b; }
inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

// Between the lanes of a warp, all of which must take part.
inline float from_lane_xor(float x, uint mask) {
  return __shfl_xor_sync(ALL_LANES, x, mask);
}
inline uint from_lane_xor(uint x, uint mask) {
  return __shfl_xor_sync(ALL_LANES, x, mask);
}
inline float largest_of_lanes(float x) {
  for (uint mask = 16; mask; mask /= 2) x = fmaxf(x, from_lane_xor(x, mask));
  return x;
}
inline float sum_of_lanes(float x) {
  for (uint mask = 16; mask; mask /= 2) x += from_lane_xor(x, mask);
  return x;
}

// What each lane has written to shared memory the others then see.
inline void lanes_meet() { __syncwarp(); }
inline void threads_meet() { __syncthreads(); }

}  // namespace paged_kv
