// Copies whole pages, also into other formats: nothing else makes quantised pages. A simdgroup takes
// one slot: a token's keys, or values, of one head. A row of the tables is two entries: from, to.
//
// Where numbers are recoded into slots with a centre, each threadgroup sums all tokens of the page, which
// it finds in the cache: threadgroups cannot wait for one of them.

#ifdef HAS_CODES
CONSTANT float LARGEST_HALF = 65504.0f;

// 0 for a scale far below float16's range: all codes of the group are then 0.
float inverse_of(float scale) {
  return magnitude(scale) < 1.17549435e-38f ? 0.0f : 1.0f / scale;
}

float code_of(float x, float inverse, float shift, float low, float high) {
  return smaller(larger(rounded_down(product(x, inverse) + shift), low), high);
}

ushort scale_bits(float scale) {
  return half_of_float(smaller(larger(scale, -LARGEST_HALF), LARGEST_HALF));
}

// Writes a token's numbers to a slot of codes, as kernels/pages/number_format.py says. Groups of 32 are
// a number of each lane.
template <uint DIM>
void encode_q8(Slots slots, uint token, uint lane, const THREAD float* x) {
  DEVICE ushort* slot = (DEVICE ushort*)slots.numbers + token * slot_words(Q8, DIM);
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    float step = largest_of_lanes(magnitude(x[i])) / 127.0f;
    float code = code_of(x[i], inverse_of(step), 0.5f, -127.0f, 127.0f);
    uint byte = uint(int(code)) & 255, word = byte | from_lane_xor(byte, 1) << 8;
    if (!(lane & 1)) slot[i * 16 + lane / 2] = ushort(word);
    if (!lane) ((DEVICE ushort*)slots.scales)[token * (DIM / GROUP) + i] = scale_bits(step);
  }
}

// Codes of 4 or 5 bits. A scale is that of SHARED_BY numbers of each lane.
template <uint FORMAT, uint DIM>
void encode_fitted(Slots slots, uint token, uint lane, const THREAD float* x) {
  constexpr uint SHARED_BY = scale_group(FORMAT, DIM) / LANES;
  constexpr float MIDDLE = FORMAT == Q5 ? 16.0f : 8.0f;
  DEVICE ushort* slot = (DEVICE ushort*)slots.numbers + token * slot_words(FORMAT, DIM);
  DEVICE ushort* fifths = (DEVICE ushort*)slots.scales + token * scale_words(FORMAT, DIM);
  DEVICE ushort* scales = fifths + fifth_words(FORMAT, DIM);
  for (uint first = 0; first < numbers_of_lane(DIM); first += SHARED_BY) {
    float high = x[first], low = x[first];
    for (uint i = first + 1; i < first + SHARED_BY; i++) high = larger(high, x[i]), low = smaller(low, x[i]);
    high = largest_of_lanes(high), low = -largest_of_lanes(-low);
    float inverse = inverse_of((high > -low ? high : low) / -MIDDLE), squares = 0.0f, products = 0.0f;
    for (uint i = first; i < first + SHARED_BY; i++) {
      float code = code_of(x[i], inverse, MIDDLE + 0.5f, 0.0f, 2.0f * MIDDLE - 1.0f);
      squares += (code - MIDDLE) * (code - MIDDLE);
      products += sum_of_lanes(product(code - MIDDLE, x[i]));
      uint whole = uint(int(code)), byte = (whole & 15) | from_lane_xor(whole & 15, 16) << 4;
      uint word = byte | from_lane_xor(byte, 1) << 8;
      if (!(lane & 1) && lane < 16) slot[i * 8 + lane / 2] = ushort(word);
      uint bits = (whole >> 4) << fifth_place(lane);
      for (uint h = 1; FORMAT == Q5 && h < LANES; h *= 2) bits |= from_lane_xor(bits, h);
      if (FORMAT == Q5 && lane < 2) fifths[i * 2 + lane] = ushort(bits >> lane * 16);
    }
    ushort scale = scale_bits(product(products, inverse_of(sum_of_lanes(squares))));
    if (!lane) scales[first / SHARED_BY] = scale;
  }
}

template <uint DIM>
void encode_slot(Slots slots, uint token, uint lane, const THREAD float* x) {
#ifdef HAS_Q8
  if (slots.format == Q8) encode_q8<DIM>(slots, token, lane, x);
#endif
#ifdef HAS_Q4
  if (slots.format == Q4) encode_fitted<Q4, DIM>(slots, token, lane, x);
#endif
#ifdef HAS_Q5
  if (slots.format == Q5) encode_fitted<Q5, DIM>(slots, token, lane, x);
#endif
}

// Turns numbers that were held in one way into the basis in which they will be held.
template <uint DIM>
void turn(Slots from, Slots to, uint lane, THREAD float* x) {
  if (from.is_rotated() != to.is_rotated() && DIM % LANES == 0) rotate<DIM>(x, lane);
}

#ifdef HAS_Q5
// Subtracts the centre of a head's page from a token's numbers: see kernels/pages/number_format.py.
// Each simdgroup sums every fourth token, so SLOT_SIMDGROUPS is its CENTRE_PARTS. `sums` is memory for
// DIM numbers of each.
template <uint DIM>
void subtract_centre(Slots from, Slots to, const THREAD Place& place, SHARED float* sums, THREAD float* x) {
  float centre[numbers_of_lane(DIM)], next[numbers_of_lane(DIM)];
  read_slot<DIM>(from, place.simdgroup, place.lane, centre);
  for (uint token = place.simdgroup + SLOT_SIMDGROUPS; token < PAGE_SIZE; token += SLOT_SIMDGROUPS) {
    read_slot<DIM>(from, token, place.lane, next);
    for (uint i = 0; i < numbers_of_lane(DIM); i++) centre[i] += next[i];
  }
  for (uint i = 0; i < numbers_of_lane(DIM); i++)
    if (i * LANES + place.lane < DIM) sums[place.simdgroup * DIM + i * LANES + place.lane] = centre[i];
  threads_meet();
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + place.lane;
    if (at >= DIM) continue;
    centre[i] = sums[at];
    for (uint part = 1; part < SLOT_SIMDGROUPS; part++) centre[i] += sums[part * DIM + at];
    centre[i] = product(centre[i], 1.0f / PAGE_SIZE);
  }
  turn<DIM>(from, to, place.lane, centre);
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    ushort bits = magnitude(centre[i]) <= LARGEST_HALF ? half_of_float(centre[i]) : ushort(0);
    if (place.x + place.simdgroup == 0 && i * LANES + place.lane < DIM)
      ((DEVICE ushort*)to.centre)[i * LANES + place.lane] = bits;
    x[i] -= float_of_half(bits);
  }
}
#endif

// Into a slot of another format.
template <uint DIM>
void recode_slot(Slots from, Slots to, uint token, const THREAD Place& place, SHARED float* sums) {
  float x[numbers_of_lane(DIM)];
  read_slot<DIM>(from, token, place.lane, x);
  turn<DIM>(from, to, place.lane, x);
#ifdef HAS_Q5
  if (to.centre) subtract_centre<DIM>(from, to, place, sums, x);
#endif
  if (to.format == FLOATS) write_slot<DIM>(to, token, place.lane, x);
  else encode_slot<DIM>(to, token, place.lane, x);
}
#endif

// Floats of threadgroup memory that `copy_side` takes.
#ifdef HAS_Q5
CONSTANT uint COPY_SUMS = SLOT_SIMDGROUPS * K_DIM;
#else
CONSTANT uint COPY_SUMS = 1;
#endif

template <uint DIM>
void copy_side(const THREAD Pages& pages, const THREAD Place& place, bool values, SHARED float* sums) {
  DEVICE const int* pair = pages.row(place.z / 2);
#ifdef HAS_SUMMARIES
  // The same in all formats.
  if (!values) copy_summary(pages, uint(pair[0]), uint(pair[1]), place);
#endif
  Slots from = pages.slots(uint(pair[0]), place.y, DIM, values);
  Slots to = pages.slots(uint(pair[1]), place.y, DIM, values);
  uint token = place.x * SLOT_SIMDGROUPS + place.simdgroup;
#ifdef HAS_CODES
  if (from.format != to.format) {
    recode_slot<DIM>(from, to, token, place, sums);
    return;
  }
#endif
  uint words = slot_words(from.format, DIM), scales = scale_words(from.format, DIM);
  for (uint i = place.lane; i < words; i += LANES)
    ((DEVICE ushort*)to.numbers)[token * words + i] = from.numbers[token * words + i];
  for (uint i = place.lane; from.format != FLOATS && i < scales; i += LANES)
    ((DEVICE ushort*)to.scales)[token * scales + i] = from.scales[token * scales + i];
#ifdef HAS_Q5
  for (uint i = place.lane; token == 0 && from.centre && i < DIM; i += LANES)
    ((DEVICE ushort*)to.centre)[i] = from.centre[i];
#endif
}
