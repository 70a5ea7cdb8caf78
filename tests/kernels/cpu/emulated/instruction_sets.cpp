// In the place of kernels/cpu/instruction_sets.cpp: AVX-512 whatever the machine has.
#include "../../../../kernels/cpu/instruction_sets.h"

#include <string.h>

namespace paged_kv {

const Kernels& chosen_kernels() { return avx512_kernels; }

}  // namespace paged_kv

const char* paged_kv_instruction_sets(void) { return "avx512"; }

int paged_kv_use_instruction_set(const char* name) { return strcmp(name, "avx512") != 0; }
