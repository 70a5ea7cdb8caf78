// The part of CUDA that the kernels use, for a CPU. Lanes of a warp meet in gpu_exchange, whichever
// operation they perform; the line of the call tells one meeting place from another.
#pragma once

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;

#define __global__
#define __device__
#define __grid_constant__
#define SITE unsigned site = __builtin_LINE()

struct Ids {
  uint32_t in_grid[3], in_group[3], group[3], group_size[3], groups[3];
  uint32_t lane, simdgroup, index;
};

extern "C" {
const Ids* gpu_ids();
void gpu_barrier(uint32_t flags, uint32_t site);
void gpu_simd_barrier(uint32_t flags, uint32_t site);
const void* const* gpu_exchange(const void* value, uint32_t bytes, uint32_t site);
void* gpu_shared(uint32_t number, uint64_t bytes);
}

struct dim3 {
  unsigned x, y, z;
};

inline dim3 dim3_of(const uint32_t* x) { return {x[0], x[1], x[2]}; }
#define threadIdx dim3_of(gpu_ids()->in_group)
#define blockIdx dim3_of(gpu_ids()->group)
#define blockDim dim3_of(gpu_ids()->group_size)
#define gridDim dim3_of(gpu_ids()->groups)

// As the compiler's own vectors, so that one load is one load.
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef unsigned uint2 __attribute__((ext_vector_type(2)));
typedef unsigned uint4 __attribute__((ext_vector_type(4)));

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// Numbers of 16 bits: made from a float only where the text says so, as in CUDA without its
// conversions.
template <typename Held>
struct Half {
  Held held;
  Half() = default;
  explicit Half(float number) : held(static_cast<Held>(number)) {}
  operator float() const { return static_cast<float>(held); }
};
typedef Half<_Float16> __half;
typedef Half<__bf16> __nv_bfloat16;

inline float __half2float(__half number) { return number; }
inline __half __float2half_rn(float number) { return __half(number); }
inline __half __ushort_as_half(unsigned short bits) { return bits_as<__half>(bits); }
inline unsigned short __half_as_ushort(__half number) { return bits_as<unsigned short>(number); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 number) {
  return bits_as<unsigned short>(number);
}
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __fmul_rn(float a, float b) { return a * b; }

inline float exp2f(float x) { return __builtin_exp2f(x); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float floorf(float x) { return __builtin_floorf(x); }
inline float rintf(float x) { return __builtin_rintf(x); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }

// A barrier of the block also orders memory of the device, for the block.
inline void __syncthreads(SITE) { gpu_barrier(3, site); }
inline void __syncwarp(unsigned = ~0u, SITE) { gpu_simd_barrier(3, site); }

template <typename T>
inline T value_of_lane(T value, unsigned lane, unsigned site) {
  const void* const* lanes = gpu_exchange(&value, sizeof(T), site);
  return *static_cast<const T*>(lanes[lane % 32]);
}

template <typename T>
inline T __shfl_sync(unsigned, T value, unsigned lane, SITE) {
  return value_of_lane(value, lane, site);
}
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, unsigned mask, SITE) {
  return value_of_lane(value, gpu_ids()->lane ^ mask, site);
}

namespace mlx::core::cu {
struct Strides {
  int64_t all[10];
  int64_t operator[](unsigned i) const { return all[i]; }
};
}  // namespace mlx::core::cu
