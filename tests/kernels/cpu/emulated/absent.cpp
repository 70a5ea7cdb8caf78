// Kernels that a machine without AVX-512 never runs: a library with sanitizers is built without them.
#include "../../../../kernels/cpu/attention.h"

namespace paged_kv {

const Kernels avx512_kernels{}, avx512_bf16_kernels{};

}  // namespace paged_kv
