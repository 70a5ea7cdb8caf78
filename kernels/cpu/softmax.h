// What softmax needs: powers of two, and which keys a query sees.
#pragma once

#include "attention.h"

namespace {

using namespace paged_kv;

// The p with 2^x = 1 + x p, for x in [-1/2, 1/2]. The polynomial 1 + x p is the minimax one of degree 6.
INLINE vec exp2_slope(vec x) {
  vec p = set1(1.5403530e-4f);
  p = fma(p, x, set1(1.3333558e-3f));
  p = fma(p, x, set1(9.6181291e-3f));
  p = fma(p, x, set1(5.5504109e-2f));
  p = fma(p, x, set1(2.4022651e-1f));
  return fma(p, x, set1(6.9314718e-1f));
}

// 2^x for x <= 0, within 1e-7 of it; far below zero it is exactly 0.
INLINE vec exp2_vec(vec x) {
  vec n = round_to_int(x), f = sub(x, n);
  return times_power_of_2(fma(exp2_slope(f), f, set1(1.f)), n);
}

// 2^x - 1 for x <= 0, also precise where it is close to 0.
INLINE vec exp2_minus_1(vec x) {
  vec n = round_to_int(x), f = sub(x, n), whole = times_power_of_2(set1(1.f), n);
  return fma(mul(exp2_slope(f), f), whole, sub(whole, set1(1.f)));
}

// Turns base-2 logits x into softcap * tanh(x / softcap).
INLINE void cap_logits(float* logits, int count, float softcap) {
  vec exponent = set1(-2.f * LOG2_E / softcap);
  for (int i = 0; i < count; i += W) {
    vec x = load(logits + i), magnitude = max(x, sub(zero(), x));
    // Bounded for infinite logits. The second operand is what `max` keeps of a NaN.
    vec power = exp2_minus_1(max(set1(-200.f), mul(magnitude, exponent)));
    vec below_zero = mul(set1(softcap), div(power, add(set1(2.f), power)));
    store(logits + i, between(x, set1(-INFINITY), zero(), below_zero, sub(zero(), below_zero)));
  }
}

// The first key that a query at a position sees, and the one behind the last.
INLINE int first_seen(const Attention& a, int position) {
  return a.window && position >= a.window ? position - a.window + 1 : 0;
}
INLINE int seen_end(const Attention& a, int position, int length) {
  return a.causal || a.window ? position + 1 : length;
}

}  // namespace
