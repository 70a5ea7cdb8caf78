// Whole rows in every format as floats, and floats as rows.
#pragma once

#include <algorithm>

#include "quantisation.h"
#include "rotation.h"
#include "row_loaders.h"

namespace {

constexpr int FORMATS = 6;
constexpr float LARGEST_F16 = 65504.f;

// A token's fifth bits and scales.
INLINE uint16_t* fifths_of(const RowRun& run, int t, int dim) {
  return (uint16_t*)run.scales + (ptrdiff_t)t * scale_words(run.format, dim);
}

INLINE uint16_t* scales_of(const RowRun& run, int t, int dim) {
  return fifths_of(run, t, dim) + fifth_words(run.format, dim);
}

// Floats of row t, each times `factor`, in the run's basis; the last vector's upper half, where the
// row has none, zeros.
template <int FORMAT>
void read_row(const RowRun& run, int t, int dim, float factor, float* out) {
  typedef Loader<FORMAT> L;
  typename L::Row row = L::at(run, t);
  vec by = set1(factor);
  int d = 0;
  for (; d + W <= dim; d += W) store(out + d, mul(by, L::template load<false>(row, d)));
  if (d < dim) store(out + d, mul(by, L::template load<true>(row, d)));
}

template <>
void read_row<PAGED_KV_Q8>(const RowRun& run, int t, int dim, float factor, float* out) {
  const char* row = run.data + t * run.stride;
  const uint16_t* scales = scales_of(run, t, dim);
  for (int d = 0; d < dim; d += W) {
    vec scale = set1(factor * float_of_f16(scales[d / GROUP]));
    store(out + d, mul(scale, load_bytes(row + d)));
  }
}

// Codes of 4 or 5 bits.
template <int FORMAT>
void read_halves(const RowRun& run, int t, int dim, float factor, float* out) {
  const char* row = run.data + t * run.stride;
  const uint16_t *fifths = fifths_of(run, t, dim), *scales = scales_of(run, t, dim);
  int shift = scale_shift(FORMAT, dim);
  for (int d = 0; d < dim; d += GROUP) {
    vec scale = set1(factor * float_of_f16(scales[d >> shift]));
    uint32_t bits = 0;
    char codes[GROUP];
    if (FORMAT == PAGED_KV_Q5) memcpy(&bits, fifths + d / 16, sizeof bits);
    unpack_halves(row + d / 2, bits, codes);
    for (int i = 0; i < GROUP; i += W) {
      vec x = mul(scale, sub(load_bytes(codes + i), set1(FORMAT == PAGED_KV_Q5 ? 16.f : 8.f)));
      if (FORMAT == PAGED_KV_Q5) x = fma(set1(factor), load_f16<false>((const uint16_t*)run.centre + d + i), x);
      store(out + d + i, x);
    }
  }
}

typedef void (*ReadRow)(const RowRun&, int, int, float, float*);
constexpr ReadRow READ_ROW[FORMATS] = {read_row<0>, read_row<1>,    read_row<2>,
                                       read_row<3>, read_halves<4>, read_halves<5>};

template <int FORMAT, bool HALF>
INLINE void store_as(char* out, int d, vec x) {
  if (FORMAT == PAGED_KV_F32) store_f32<HALF>((float*)out + d, x);
  else if (FORMAT == PAGED_KV_F16) store_f16<HALF>((uint16_t*)out + d, x);
  else store_bf16<HALF>((uint16_t*)out + d, x);
}

// Writes `count` rows, which follow each other in a run, from its row t on.
template <int FORMAT>
void write_floats(const float* rows, int count, int dim, const RowRun& run, int t) {
  char* out = run.data + t * run.stride;
  int d = 0, numbers = count * dim;
  for (; d + W <= numbers; d += W) store_as<FORMAT, false>(out, d, load(rows + d));
  if (d < numbers) store_as<FORMAT, true>(out, d, load(rows + d));
}

template <int FORMAT>
void write_codes(const float* rows, int count, int dim, const RowRun& run, int t) {
  PerGroup scales;
  uint32_t fifths[LONGEST_HEAD / GROUP];
  int groups = dim / GROUP, shared = (1 << scale_shift(FORMAT, dim)) / GROUP;
  quantise<FORMAT>(rows, count * groups, shared, run.data + t * run.stride, fifths, scales);
  for (int r = 0; r < count; r++) {
    memcpy(fifths_of(run, t + r, dim), fifths + r * groups, fifth_words(FORMAT, dim) * sizeof(uint16_t));
    uint16_t* to = scales_of(run, t + r, dim);
    for (int i = 0; i < groups; i += shared)
      *to++ = f16_of_float(clamped(scales.at[r * groups + i], -LARGEST_F16, LARGEST_F16));
  }
}

typedef void (*WriteRows)(const float*, int, int, const RowRun&, int);
constexpr WriteRows WRITE_ROWS[FORMATS] = {write_floats<0>, write_floats<1>, write_floats<2>,
                                           write_codes<3>, write_codes<4>, write_codes<5>};

// The centre of a page's rows, rotated as codes are; puts it into `to`. Tokens are added in the order of
// number_format.py.
void find_centre(const RowRun& from, const RowRun& to, int dim, float* centre) {
  alignas(64) float parts[CENTRE_PARTS][LONGEST_HEAD], row[LONGEST_HEAD];
  for (int t = 0; t < CENTRE_PARTS; t++) READ_ROW[from.format](from, t, dim, 1.f, parts[t]);
  for (int t = CENTRE_PARTS; t < PAGE_SIZE; t++) {
    READ_ROW[from.format](from, t, dim, 1.f, row);
    float* part = parts[t % CENTRE_PARTS];
    for (int d = 0; d < dim; d += W) store(part + d, add(load(part + d), load(row + d)));
  }
  for (int d = 0; d < dim; d += W) {
    vec sum = load(parts[0] + d);
    for (int i = 1; i < CENTRE_PARTS; i++) sum = add(sum, load(parts[i] + d));
    store(centre + d, mul(sum, set1(1.f / PAGE_SIZE)));
  }
  if (!from.is_rotated()) rotate(centre, dim);
  for (int d = 0; d < dim; d++) {
    bool is_held = centre[d] >= -LARGEST_F16 && centre[d] <= LARGEST_F16;
    uint16_t half = f16_of_float(is_held ? centre[d] : 0.f);
    ((uint16_t*)to.centre)[d] = half;
    centre[d] = float_of_f16(half);
  }
}

// Recodes the rows of a page, as many at a time as the longest head has numbers: one of 64 numbers has
// two groups, too few for the machine to compute while one of them waits.
void recode(const RowRun& from, const RowRun& to, int dim) {
  alignas(64) float rows[LONGEST_HEAD], centre[LONGEST_HEAD];
  int most = LONGEST_HEAD / dim;
  if (to.centre) find_centre(from, to, dim, centre);
  for (int t = 0; t < PAGE_SIZE; t += most) {
    int n = std::min(most, PAGE_SIZE - t);
    for (int i = 0; i < n; i++) {
      READ_ROW[from.format](from, t + i, dim, 1.f, rows + i * dim);
      if (from.is_rotated() != to.is_rotated()) rotate(rows + i * dim, dim);
      for (int d = 0; to.centre && d < dim; d += W)
        store(rows + i * dim + d, sub(load(rows + i * dim + d), load(centre + d)));
    }
    WRITE_ROWS[to.format](rows, n, dim, to, t);
  }
}

}  // namespace
