// The words in which kernels/gpu is written, for Metal. kernels/cuda/dialect.h has the same.

#define DEVICE device
#define SHARED threadgroup
#define THREAD thread
#define CONSTANT constant constexpr  // of the program, which has no others
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_2 _Pragma("clang loop unroll_count(2)")

float float_of_bits(uint bits) { return as_type<float>(bits); }
float float_of_half(ushort bits) { return float(as_type<half>(bits)); }
ushort half_of_float(float number) { return as_type<ushort>(half(number)); }

// Numbers of the model's dtype and their bits.
float number_of(ushort bits) { return float(as_type<T>(bits)); }
ushort bits_of(T number) { return as_type<ushort>(number); }

// Never joined with a sum that follows: codes are rounded as on all backends.
float product(float a, float b) {
#pragma METAL fp contract(off)
  return a * b;
}

float power_of_2(float x) { return metal::exp2(x); }
float magnitude(float x) { return metal::abs(x); }
float rounded_down(float x) { return metal::floor(x); }
float root(float x) { return metal::sqrt(x); }
float larger(float a, float b) { return metal::max(a, b); }
float smaller(float a, float b) { return metal::min(a, b); }
uint larger(uint a, uint b) { return metal::max(a, b); }
uint smaller(uint a, uint b) { return metal::min(a, b); }
float multiply_add(float a, float b, float c) { return metal::fma(a, b, c); }

// Between the lanes of a simdgroup, all of which must take part.
float largest_of_lanes(float x) { return metal::simd_max(x); }
float sum_of_lanes(float x) { return metal::simd_sum(x); }
float from_lane_xor(float x, uint mask) { return metal::simd_shuffle_xor(x, ushort(mask)); }
uint from_lane_xor(uint x, uint mask) { return metal::simd_shuffle_xor(x, ushort(mask)); }

// What each lane has written to threadgroup memory the others then see.
void lanes_meet() { metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup); }
void threads_meet() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }
