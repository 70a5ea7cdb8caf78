// In the place of the one instruction that kernels/cuda/mma.h has, and says what it does.

template <typename T>
inline float number_of_pair(unsigned pair, unsigned which) {
  return float(bits_as<T>(static_cast<unsigned short>(pair >> which * 16)));
}

template <typename T>
inline void mma_on_cpu(float* c, const unsigned* a, const unsigned* b, SITE) {
  struct Both {
    unsigned a[4], b[2];
  } mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const void* const* lanes = gpu_exchange(&mine, sizeof mine, site);
  unsigned g = gpu_ids()->lane / 4, t = gpu_ids()->lane % 4;
  for (unsigned i = 0; i < 4; i++)
    for (unsigned k = 0; k < 16; k++) {
      unsigned column = t * 2 + i % 2;
      const Both& left = *static_cast<const Both*>(lanes[g * 4 + k % 8 / 2]);
      const Both& right = *static_cast<const Both*>(lanes[column * 4 + k % 8 / 2]);
      c[i] += number_of_pair<T>(left.a[i / 2 + k / 8 * 2], k % 2) *
              number_of_pair<T>(right.b[k / 8], k % 2);
    }
}
