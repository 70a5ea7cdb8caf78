#define KERNELS avx2_kernels
#define NAME "avx2"
#include "vector_avx2.h"
#include "kernels.inc"
