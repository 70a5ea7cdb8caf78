// A token's row spread over the lanes of a simdgroup: number i * 32 + lane is lane's i-th.
//
// So a group of 32 numbers that share a scale is one number of each lane, and the order of sums is
// the one in which MLX makes them: codes are the same on all backends.

namespace paged_kv {

constexpr uint numbers_of_lane(uint dim) { return (dim + LANES - 1) / LANES; }

// The largest power of 2 that divides `dim`.
constexpr uint rotated_block(uint dim) { return dim & (~dim + 1); }

// Turns a row into the other basis: kernels/rotation.py. Only rows whose size divides by 32 have one.
template <uint DIM>
inline void rotate(THREAD float* x, uint lane) {
  constexpr uint COUNT = DIM / LANES, BLOCK = rotated_block(DIM) / LANES;
  for (uint h = 1; h < LANES; h *= 2)
    for (uint i = 0; i < COUNT; i++) {
      float other = from_lane_xor(x[i], h);
      x[i] = lane & h ? other - x[i] : x[i] + other;
    }
  for (uint h = 1; h < BLOCK; h *= 2)
    for (uint i = 0; i < COUNT; i++)
      if (!(i & h)) {
        float a = x[i], b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
  float scale = 1.0f / root(float(rotated_block(DIM)));
  for (uint i = 0; i < COUNT; i++) x[i] = product(x[i], scale);
}

// Number `at` of a token's row of codes.
inline float code_at(DEVICE const ushort* row, uint format, uint at) {
  if (format == Q8) {
    uint word = row[at / 2];
    return float(int((at & 1 ? word >> 8 : word) << 24) >> 24);
  }
  uint byte = at % (GROUP / 2), word = row[at / GROUP * 8 + byte / 2];
  uint pair = byte & 1 ? word >> 8 : word;
  return float(int((at & 16 ? pair >> 4 : pair) & 15) - 8);
}

// A token's row, in the basis in which it is held.
template <typename T, uint DIM>
inline void read_row(Rows rows, uint token, uint lane, THREAD float* x) {
  DEVICE const ushort* row = rows.numbers + token * row_words(rows.format, DIM);
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + lane;
    if (at >= DIM) x[i] = 0.0f;
    else if (rows.format == FLOATS) x[i] = number_of<T>(row[at]);
    else
      x[i] = product(code_at(row, rows.format, at),
                     float_of_half(rows.scales[token * (DIM / GROUP) + i]));
  }
}

// 0 for a group of nothing that float16 could hold, whose codes are all 0.
inline float inverse_of(float scale) {
  return magnitude(scale) < 1.17549435e-38f ? 0.0f : 1.0f / scale;
}

inline float code_of(float x, float inverse, float shift, float low, float high) {
  return smaller(larger(rounded_down(product(x, inverse) + shift), low), high);
}

inline ushort scale_bits(float scale) {
  return half_of_float(smaller(larger(scale, -65504.0f), 65504.0f));
}

// Writes a group of codes, and the scale: kernels/number_format.py.
inline void write_q8(float x, DEVICE ushort* codes, DEVICE ushort* scale, uint lane) {
  float step = largest_of_lanes(magnitude(x)) / 127.0f;
  uint code = uint(int(code_of(x, inverse_of(step), 0.5f, -127.0f, 127.0f))) & 255;
  uint next = from_lane_xor(code, 1);
  if (!(lane & 1)) codes[lane / 2] = ushort(code | next << 8);
  if (!lane) *scale = scale_bits(step);
}

inline void write_q4(float x, DEVICE ushort* codes, DEVICE ushort* scale, uint lane) {
  float high = largest_of_lanes(x), low = -largest_of_lanes(-x);
  float step = (high > -low ? high : low) / -8.0f;
  float code = code_of(x, inverse_of(step), 8.5f, 0.0f, 15.0f) - 8.0f;
  float squares = sum_of_lanes(code * code), products = sum_of_lanes(product(code, x));
  uint nibble = uint(int(code) + 8);
  uint byte = nibble | from_lane_xor(nibble, 16) << 4;
  uint word = byte | from_lane_xor(byte, 1) << 8;
  if (lane < 16 && !(lane & 1)) codes[lane / 2] = ushort(word);
  if (!lane) *scale = scale_bits(product(products, inverse_of(squares)));
}

// Where a row is written: the pages' memory, which a kernel has as an input.
struct Target {
  DEVICE ushort* numbers;
  DEVICE ushort* scales;
  uint format;
  bool rotated;
};

inline Target target_of(Rows rows) {
  return {(DEVICE ushort*)rows.numbers, (DEVICE ushort*)rows.scales, rows.format, rows.rotated};
}

// Writes a token's row, given in the basis of the target.
template <typename T, uint DIM>
inline void write_row(Target target, uint token, uint lane, const THREAD float* x) {
  DEVICE ushort* row = target.numbers + token * row_words(target.format, DIM);
  DEVICE ushort* scales = target.scales + token * (DIM / GROUP);
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + lane;
    if (target.format == Q8) write_q8(x[i], row + i * 16, scales + i, lane);
    else if (target.format == Q4) write_q4(x[i], row + i * 8, scales + i, lane);
    else if (at < DIM) row[at] = bits_of(T(x[i]));
  }
}

}  // namespace paged_kv
