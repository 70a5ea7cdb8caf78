// The words in which kernels/gpu is written, for CUDA. kernels/metal/dialect.h has the same. MLX
// compiles functions for the device where nothing else is said.

#define DEVICE
#define SHARED
#define THREAD
#define CONSTANT constexpr  // of the program
#define UNROLL _Pragma("unroll")
#define UNROLL_2 _Pragma("unroll 2")

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;

CONSTANT uint ALL_LANES = 0xffffffffu;

float float_of_bits(uint bits) { return __uint_as_float(bits); }
float float_of_half(ushort bits) { return __half2float(__ushort_as_half(bits)); }
ushort half_of_float(float number) {
  return __half_as_ushort(__float2half_rn(number));
}

// Numbers of the model's dtype and their bits.
#ifdef BFLOAT16
float number_of(ushort bits) { return float_of_bits(uint(bits) << 16); }
ushort bits_of(T number) { return __bfloat16_as_ushort(number); }
#else
float number_of(ushort bits) { return float_of_half(bits); }
ushort bits_of(T number) { return __half_as_ushort(number); }
#endif

// Never joined with a sum that follows: codes are rounded as on all backends.
float product(float a, float b) { return __fmul_rn(a, b); }

float power_of_2(float x) { return exp2f(x); }
float magnitude(float x) { return fabsf(x); }
float rounded_down(float x) { return floorf(x); }
float root(float x) { return sqrtf(x); }
float larger(float a, float b) { return fmaxf(a, b); }
float smaller(float a, float b) { return fminf(a, b); }
uint larger(uint a, uint b) { return a > b ? a : b; }
uint smaller(uint a, uint b) { return a < b ? a : b; }
float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

// Between the lanes of a warp, all of which must take part.
float from_lane_xor(float x, uint mask) {
  return __shfl_xor_sync(ALL_LANES, x, mask);
}
uint from_lane_xor(uint x, uint mask) {
  return __shfl_xor_sync(ALL_LANES, x, mask);
}
float largest_of_lanes(float x) {
  for (uint mask = 16; mask; mask /= 2) x = fmaxf(x, from_lane_xor(x, mask));
  return x;
}
float sum_of_lanes(float x) {
  for (uint mask = 16; mask; mask /= 2) x += from_lane_xor(x, mask);
  return x;
}

// What each lane has written to shared memory the others then see.
void lanes_meet() { __syncwarp(); }
void threads_meet() { __syncthreads(); }
