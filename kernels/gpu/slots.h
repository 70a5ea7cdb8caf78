// A slot's numbers of one head, spread over the lanes of a simdgroup: number i * 32 + lane is lane's i-th.
//
// So of 32 numbers whose codes lie together each lane has one, and the order of sums is the one in which
// MLX makes them: codes are the same on all backends.

constexpr uint numbers_of_lane(uint dim) { return (dim + LANES - 1) / LANES; }

template <uint DIM, typename To>
void store_numbers(const THREAD float* x, float factor, uint lane, DEVICE To* to) {
  for (uint i = 0; i < numbers_of_lane(DIM); i++)
    if (i * LANES + lane < DIM) to[i * LANES + lane] = To(x[i] * factor);
}

// Turns a token's numbers into the other basis: number_format.py. Only sizes that divide by 32 have one.
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
// Number `at` of a slot of codes, without its fifth bit.
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

// The fifth bit of a lane's number among those of its group.
uint fifth_place(uint lane) { return lane % 4 * 8 + lane / 4; }

// The numbers of a slot, in the basis in which it holds them.
template <uint DIM>
void read_slot(Slots slots, uint token, uint lane, THREAD float* x) {
  DEVICE const ushort* slot = slots.numbers + token * slot_words(slots.format, DIM);
#ifdef HAS_CODES
  DEVICE const ushort* fifths = slots.scales + token * scale_words(slots.format, DIM);
  DEVICE const ushort* scales = fifths + fifth_words(slots.format, DIM);
#endif
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + lane;
    if (at >= DIM) x[i] = 0.0f;
#ifdef HAS_CODES
    else if (slots.format != FLOATS) {
      float code = code_at(slot, slots.format, at);
#ifdef HAS_Q5
      uint bit = fifth_place(lane);
      if (slots.format == Q5) code += float(fifths[i * 2 + bit / 16] >> bit % 16 & 1) * 16.0f - 8.0f;
#endif
      x[i] = product(code, float_of_half(scales[at / scale_group(slots.format, DIM)]));
#ifdef HAS_Q5
      if (slots.centre) x[i] += float_of_half(slots.centre[at]);
#endif
    }
#endif
    else x[i] = number_of(slot[at]);
  }
}

// Writes a token's numbers to a slot of floats. Slabs are inputs of kernels, so the slot is constant.
template <uint DIM>
void write_slot(Slots slots, uint token, uint lane, THREAD const float* x) {
  DEVICE ushort* slot = (DEVICE ushort*)slots.numbers + token * DIM;
  for (uint i = 0; i < numbers_of_lane(DIM); i++)
    if (i * LANES + lane < DIM) slot[i * LANES + lane] = bits_of(T(x[i]));
}
