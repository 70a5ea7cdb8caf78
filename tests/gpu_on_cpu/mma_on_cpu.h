// In the place of kernels/cuda/mma.h, which is one instruction of NVIDIA's.

namespace paged_kv {

struct Pairs4 {
  unsigned a[4];
};
struct Pairs2 {
  unsigned b[2];
};

template <typename T>
inline float number_of_pair(unsigned pair, unsigned which) {
  return float(bits_as<T>(static_cast<unsigned short>(pair >> which * 16)));
}

template <typename T>
inline void multiply_add_matrices(T, float* c, Pairs4 a, Pairs2 b, SITE) {
  struct Both {
    Pairs4 a;
    Pairs2 b;
  } mine = {a, b};
  const void* const* lanes = gpu_exchange(&mine, sizeof mine, site);
  unsigned g = gpu_ids()->lane / 4, t = gpu_ids()->lane % 4;
  for (unsigned i = 0; i < 4; i++)
    for (unsigned k = 0; k < 16; k++) {
      unsigned column = t * 2 + i % 2;
      const Both& left = *static_cast<const Both*>(lanes[g * 4 + k % 8 / 2]);
      const Both& right = *static_cast<const Both*>(lanes[column * 4 + k % 8 / 2]);
      c[i] += number_of_pair<T>(left.a.a[i / 2 + k / 8 * 2], k % 2) *
              number_of_pair<T>(right.b.b[k / 8], k % 2);
    }
}

}  // namespace paged_kv
