#define KERNELS avx512_bf16_kernels
#define NAME "avx512bf16"
#include "vector_avx512.h"
#include "kernels.inc"
