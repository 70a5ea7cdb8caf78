// What the compiler calls for conversions that this CPU has no instruction for.
#include "runtime.h"

// Rounded to nearest, ties to even.
EXPORT __bf16 __truncsfbf2(float number) {
  uint32_t bits = __builtin_bit_cast(uint32_t, number);
  bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  bits = is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, static_cast<uint16_t>(bits >> 16));
}
