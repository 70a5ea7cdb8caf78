// The words in which kernels/gpu is written, for Metal. kernels/cuda/dialect.h has the same.

#define DEVICE device
#define SHARED threadgroup
#define THREAD thread
#define CONSTANT constant constexpr  // of the program, which has no others
#define UNROLL _Pragma("clang loop unroll(full)")

namespace paged_kv {

inline float float_of_bits(uint bits) { return as_type<float>(bits); }
inline float float_of_half(ushort bits) { return float(as_type<half>(bits)); }
inline ushort half_of_float(float number) { return as_type<ushort>(half(number)); }

// Numbers of the model's dtype and their bits.
template <typename T>
inline float number_of(ushort bits) {
  return float(as_type<T>(bits));
}
inline ushort bits_of(half number) { return as_type<ushort>(number); }
inline ushort bits_of(bfloat number) { return as_type<ushort>(number); }

// Never joined with a sum that follows: codes are rounded as on all backends.
inline float product(float a, float b) {
#pragma METAL fp contract(off)
  return a * b;
}

inline float power_of_2(float x) { return metal::exp2(x); }
inline float magnitude(float x) { return metal::abs(x); }
inline float rounded_down(float x) { return metal::floor(x); }
inline float nearest(float x) { return metal::rint(x); }
inline float root(float x) { return metal::sqrt(x); }
inline float larger(float a, float b) { return metal::max(a, b); }
inline float smaller(float a, float b) { return metal::min(a, b); }
inline uint larger(uint a, uint b) { return metal::max(a, b); }
inline uint smaller(uint a, uint b) { return metal::min(a, b); }
inline float multiply_add(float a, float b, float c) { return metal::fma(a, b, c); }

// Between the lanes of a simdgroup, all of which must take part.
inline float largest_of_lanes(float x) { return metal::simd_max(x); }
inline float sum_of_lanes(float x) { return metal::simd_sum(x); }
inline float from_lane_xor(float x, uint mask) { return metal::simd_shuffle_xor(x, ushort(mask)); }
inline uint from_lane_xor(uint x, uint mask) { return metal::simd_shuffle_xor(x, ushort(mask)); }

// What each lane has written to threadgroup memory the others then see.
inline void lanes_meet() { metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup); }
inline void threads_meet() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }

}  // namespace paged_kv
