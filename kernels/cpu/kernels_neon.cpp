#define KERNELS neon_kernels
#define NAME "neon"
#include "vector_neon.h"
#include "kernels.inc"
