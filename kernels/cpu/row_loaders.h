// How a vector of numbers is read from a token's row of floats.
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

}  // namespace
