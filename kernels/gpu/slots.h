// A slot's numbers of one head, spread over the lanes of a simdgroup: number i * 32 + lane is lane's i-th.
//
// So a group of 32 numbers that share a scale is one number of each lane, and the order of sums is
// the one in which MLX makes them: codes are the same on all backends.

constexpr uint numbers_of_lane(uint dim) { return (dim + LANES - 1) / LANES; }

template <uint DIM, typename To>
void store_numbers(const THREAD float* x, float factor, uint lane, DEVICE To* to) {
  for (uint i = 0; i < numbers_of_lane(DIM); i++)
    if (i * LANES + lane < DIM) to[i * LANES + lane] = To(x[i] * factor);
}

// The largest power of 2 that divides `dim`.
constexpr uint rotated_block(uint dim) { return dim & (~dim + 1); }

// Turns a token's numbers into the other basis: kernels/pages/rotation.py. Only sizes that divide by 32 have one.
template <uint DIM>
void rotate(THREAD float* x, uint lane) {
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

#ifdef HAS_CODES
// Number `at` of a slot of codes.
float code_at(DEVICE const ushort* slot, uint format, uint at) {
  if (format == Q8) {
    uint word = slot[at / 2];
    return float(int((at & 1 ? word >> 8 : word) << 24) >> 24);
  }
  uint byte = at % (GROUP / 2), word = slot[at / GROUP * 8 + byte / 2];
  uint pair = byte & 1 ? word >> 8 : word;
  return float(int((at & 16 ? pair >> 4 : pair) & 15) - 8);
}
#endif

// The numbers of a slot, in the basis in which it holds them.
template <uint DIM>
void read_slot(Slots slots, uint token, uint lane, THREAD float* x) {
  DEVICE const ushort* slot = slots.numbers + token * slot_words(slots.format, DIM);
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + lane;
    if (at >= DIM) x[i] = 0.0f;
#ifdef HAS_CODES
    else if (slots.format != FLOATS)
      x[i] = product(code_at(slot, slots.format, at),
                     float_of_half(slots.scales[token * (DIM / GROUP) + i]));
#endif
    else x[i] = number_of(slot[at]);
  }
}

// 0 for a scale far below float16's range: all codes of the group are then 0.
float inverse_of(float scale) {
  return magnitude(scale) < 1.17549435e-38f ? 0.0f : 1.0f / scale;
}

float code_of(float x, float inverse, float shift, float low, float high) {
  return smaller(larger(rounded_down(product(x, inverse) + shift), low), high);
}

ushort scale_bits(float scale) {
  return half_of_float(smaller(larger(scale, -65504.0f), 65504.0f));
}

// Encodes a group, of which each lane has a number; see kernels/pages/number_format.py. Outputs the
// lane's code, the word of codes that the lane writes (if any), and the bits of the scale.
float encode_q8(float x, THREAD uint& word, THREAD ushort& scale) {
  float step = largest_of_lanes(magnitude(x)) / 127.0f;
  float code = code_of(x, inverse_of(step), 0.5f, -127.0f, 127.0f);
  uint byte = uint(int(code)) & 255;
  word = byte | from_lane_xor(byte, 1) << 8;
  scale = scale_bits(step);
  return code;
}

float encode_q4(float x, THREAD uint& word, THREAD ushort& scale) {
  float high = largest_of_lanes(x), low = -largest_of_lanes(-x);
  float step = (high > -low ? high : low) / -8.0f;
  float code = code_of(x, inverse_of(step), 8.5f, 0.0f, 15.0f) - 8.0f;
  float squares = sum_of_lanes(code * code), products = sum_of_lanes(product(code, x));
  uint nibble = uint(int(code) + 8);
  uint byte = nibble | from_lane_xor(nibble, 16) << 4;
  word = byte | from_lane_xor(byte, 1) << 8;
  scale = scale_bits(product(products, inverse_of(squares)));
  return code;
}

// Turns a token's numbers into those that a page holds, rotated first if `turn`. If `writes`, also
// writes them to the slot, which is an input of the kernel.
template <uint DIM>
void encode_slot(Slots slots, uint token, bool turn, bool writes, uint lane, THREAD float* x) {
#ifdef HAS_CODES
  if (turn && DIM % LANES == 0) rotate<DIM>(x, lane);
#endif
  DEVICE ushort* slot = (DEVICE ushort*)slots.numbers + token * slot_words(slots.format, DIM);
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + lane;
#ifdef HAS_CODES
    if (slots.format != FLOATS) {
      uint word = 0, words = slot_words(slots.format, GROUP);
      ushort scale = 0;
      float code = 0.0f;
#ifdef HAS_Q8
      if (slots.format == Q8) code = encode_q8(x[i], word, scale);
#endif
#ifdef HAS_Q4
      if (slots.format == Q4) code = encode_q4(x[i], word, scale);
#endif
      if (writes && !(lane & 1) && lane / 2 < words) slot[i * words + lane / 2] = ushort(word);
      if (writes && !lane)
        ((DEVICE ushort*)slots.scales)[token * (DIM / GROUP) + i] = scale;
      x[i] = product(code, float_of_half(scale));
      continue;
    }
#endif
    if (writes && at < DIM) slot[at] = bits_of(T(x[i]));
  }
}
