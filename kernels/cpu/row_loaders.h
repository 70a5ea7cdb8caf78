// How a vector of numbers is read from a token's row, for each page format.
//
// A format is one specialisation of Loader: `at` finds a token's row, and `load` reads the numbers
// [d, d + W) of it, or only [d, d + W / 2) and zeros behind. Included after a vector header.
#pragma once

#include "attention.h"

namespace {

using namespace paged_kv;

template <int FORMAT>
struct Loader;

template <>
struct Loader<PAGED_KV_F32> {
  typedef const float* Row;
  INLINE Row at(const RowRun& run, int t) { return (Row)(run.data + t * run.stride); }
  template <bool HALF>
  INLINE vec load(Row row, int d) {
    return load_f32<HALF>(row + d);
  }
};

template <>
struct Loader<PAGED_KV_F16> {
  typedef const uint16_t* Row;
  INLINE Row at(const RowRun& run, int t) { return (Row)(run.data + t * run.stride); }
  template <bool HALF>
  INLINE vec load(Row row, int d) {
    return load_f16<HALF>(row + d);
  }
};

template <>
struct Loader<PAGED_KV_BF16> {
  typedef const uint16_t* Row;
  INLINE Row at(const RowRun& run, int t) { return (Row)(run.data + t * run.stride); }
  template <bool HALF>
  INLINE vec load(Row row, int d) {
    return load_bf16<HALF>(row + d);
  }
};

constexpr int FORMATS = 3;

// Floats of a row, each times `factor`; the last vector's upper half, where the row has none, zeros.
template <int FORMAT>
void read_row(const char* data, int dim, float factor, float* out) {
  typedef Loader<FORMAT> L;
  typename L::Row row = L::at(RowRun{data, 0}, 0);
  vec by = set1(factor);
  int d = 0;
  for (; d + W <= dim; d += W) store(out + d, mul(by, L::template load<false>(row, d)));
  if (d < dim) store(out + d, mul(by, L::template load<true>(row, d)));
}

typedef void (*ReadRow)(const char*, int, float, float*);
constexpr ReadRow READ_ROW[FORMATS] = {read_row<0>, read_row<1>, read_row<2>};

template <int FORMAT, bool HALF>
INLINE void store_as(char* out, int d, vec x) {
  if (FORMAT == PAGED_KV_F32) store_f32<HALF>((float*)out + d, x);
  else if (FORMAT == PAGED_KV_F16) store_f16<HALF>((uint16_t*)out + d, x);
  else store_bf16<HALF>((uint16_t*)out + d, x);
}

template <int FORMAT>
void write_row(const float* row, int dim, char* out) {
  int d = 0;
  for (; d + W <= dim; d += W) store_as<FORMAT, false>(out, d, load(row + d));
  if (d < dim) store_as<FORMAT, true>(out, d, load(row + d));
}

typedef void (*WriteRow)(const float*, int, char*);
constexpr WriteRow WRITE_ROW[FORMATS] = {write_row<0>, write_row<1>, write_row<2>};

// 2^x for x <= 0, within 1e-7 of it; far below zero it is exactly 0. The polynomial is the minimax
// one of degree 6 on [-1/2, 1/2].
INLINE vec exp2_vec(vec x) {
  vec n = round_to_int(x), f = sub(x, n), p = set1(1.5403530e-4f);
  p = fma(p, f, set1(1.3333558e-3f));
  p = fma(p, f, set1(9.6181291e-3f));
  p = fma(p, f, set1(5.5504109e-2f));
  p = fma(p, f, set1(2.4022651e-1f));
  p = fma(p, f, set1(6.9314718e-1f));
  return times_power_of_2(fma(p, f, set1(1.f)), n);
}

// The first key that a query at a position sees, and the one behind the last.
INLINE int first_seen(const Attention& a, int position) {
  return a.window && position >= a.window ? position - a.window + 1 : 0;
}
INLINE int seen_end(const Attention& a, int position, int length) {
  return a.causal || a.window ? position + 1 : length;
}

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int clamped(int x, int low, int high) { return smaller(larger(x, low), high); }

}  // namespace
