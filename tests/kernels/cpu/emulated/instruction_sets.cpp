// In the place of kernels/cpu/instruction_sets.cpp: the kernels SET alone, whatever the machine has.
#include "../../../../kernels/cpu/instruction_sets.h"

#include <string.h>

namespace paged_kv {

const Kernels& chosen_kernels() { return SET; }

}  // namespace paged_kv

const char* paged_kv_instruction_sets(void) { return paged_kv::SET.name; }

int paged_kv_use_instruction_set(const char* name) { return strcmp(name, paged_kv::SET.name) != 0; }
