#define KERNELS generic_kernels
#define NAME "generic"
#include "vector_generic.h"
#include "kernels.inc"
