// The part of Metal that the kernels use, for clang's C++ for OpenCL: its address spaces are real.
//
// Lanes of a simdgroup meet in gpu_exchange, whichever operation they perform; the line of the call
// tells one meeting place from another.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;

#define VECTORS(T)                                   \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
VECTORS(uchar) VECTORS(ushort) VECTORS(int) VECTORS(uint) VECTORS(half) VECTORS(float)

#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#define SITE uint site = __builtin_LINE()

struct Ids {
  uint in_grid[3], in_group[3], group[3], group_size[3], groups[3];
  uint lane, simdgroup, index;
};

extern "C" {
const thread Ids* gpu_ids();
void gpu_barrier(uint flags, uint site);
void gpu_simd_barrier(uint flags, uint site);
const thread ulong* gpu_exchange(const thread void* value, uint bytes, uint site);
ulong gpu_shared(uint number, ulong bytes);
}

template <typename To, typename From>
inline To as_type(From from) {
  return __builtin_bit_cast(To, from);
}

namespace metal {

using ::as_type;

inline float exp2(float x) { return __builtin_exp2f(x); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline float floor(float x) { return __builtin_floorf(x); }
inline float rint(float x) { return __builtin_rintf(x); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline uint max(uint a, uint b) { return a > b ? a : b; }
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

inline void threadgroup_barrier(mem_flags flags, SITE) { gpu_barrier(uint(flags), site); }
inline void simdgroup_barrier(mem_flags flags, SITE) { gpu_simd_barrier(uint(flags), site); }

// What the lanes have brought.
template <typename T>
struct Lanes {
  const thread ulong* places;
  inline T operator[](uint lane) const thread { return *(const thread T*)places[lane]; }
};

template <typename T>
inline Lanes<T> exchanged(T value, uint site) {
  return {gpu_exchange((const thread void*)&value, sizeof(T), site)};
}

// A lane that is not there gives what a real device may give: anything.
template <typename T>
inline T value_of_lane(T value, uint lane, uint site) {
  Lanes<T> lanes = exchanged(value, site);
  return lane < 32 ? lanes[lane] : as_type<T>(~0u);
}

inline float simd_shuffle(float x, ushort lane, SITE) { return value_of_lane(x, lane, site); }
inline uint simd_shuffle(uint x, ushort lane, SITE) { return value_of_lane(x, lane, site); }
inline float simd_shuffle_xor(float x, ushort mask, SITE) {
  return value_of_lane(x, gpu_ids()->lane ^ mask, site);
}
inline uint simd_shuffle_xor(uint x, ushort mask, SITE) {
  return value_of_lane(x, gpu_ids()->lane ^ mask, site);
}

#define REDUCTION(name, T, step)                \
  inline T name(T x, SITE) {                    \
    Lanes<T> lanes = exchanged(x, site);        \
    T all = lanes[0];                           \
    for (uint lane = 1; lane < 32; lane++) {    \
      T next = lanes[lane];                     \
      all = step;                               \
    }                                           \
    return all;                                 \
  }
REDUCTION(simd_sum, float, all + next)
REDUCTION(simd_max, float, max(all, next))
REDUCTION(simd_min, float, min(all, next))
REDUCTION(simd_min, uint, min(all, next))
REDUCTION(simd_max, uint, max(all, next))

// A lane holds two numbers that lie side by side: MLX's steel kernels rely on this order too
// (mlx/backend/metal/kernels/steel/attn/mma.h).
template <typename T, int COLUMNS, int ROWS>
struct simdgroup_matrix {
  static_assert(COLUMNS == 8 && ROWS == 8, "only 8 by 8");
  typedef T Pair __attribute__((ext_vector_type(2)));
  Pair pair;
  inline thread Pair& thread_elements() thread { return pair; }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

inline uint row_of_lane(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
inline uint column_of_lane(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
inline uint lane_of(uint row, uint column) {
  return (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column & 2) / 2;
}

struct TwoPairs {
  float2 a, b;
};

inline void simdgroup_multiply_accumulate(thread simdgroup_float8x8& d, simdgroup_float8x8 a,
                                          simdgroup_float8x8 b, simdgroup_float8x8 c, SITE) {
  TwoPairs mine = {a.pair, b.pair};
  Lanes<TwoPairs> lanes = exchanged(mine, site);
  uint row = row_of_lane(gpu_ids()->lane), column = column_of_lane(gpu_ids()->lane);
  float2 sum = c.pair;
  for (uint k = 0; k < 8; k++) {
    float factor = lanes[lane_of(row, k)].a[k & 1];
    sum += factor * lanes[lane_of(k, column)].b;
  }
  d.pair = sum;
}

}  // namespace metal

using namespace metal;  // as MLX's utils.h does, which stands before every kernel
