#define KERNELS avx512_kernels
#define NAME "avx512"
#include "vector_avx512.h"
#include "kernels.inc"
