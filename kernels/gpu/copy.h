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

// Encodes a group, of which each lane has a number; see kernels/pages/number_format.py. Outputs the word
// of codes that the lane writes (if any), and the bits of the scale.
void encode_q8(float x, THREAD uint& word, THREAD ushort& scale) {
  float step = largest_of_lanes(magnitude(x)) / 127.0f;
  float code = code_of(x, inverse_of(step), 0.5f, -127.0f, 127.0f);
  uint byte = uint(int(code)) & 255;
  word = byte | from_lane_xor(byte, 1) << 8;
  scale = scale_bits(step);
}

void encode_q4(float x, THREAD uint& word, THREAD ushort& scale) {
  float high = largest_of_lanes(x), low = -largest_of_lanes(-x);
  float step = (high > -low ? high : low) / -8.0f;
  float code = code_of(x, inverse_of(step), 8.5f, 0.0f, 15.0f) - 8.0f;
  float squares = sum_of_lanes(code * code), products = sum_of_lanes(product(code, x));
  uint nibble = uint(int(code) + 8);
  uint byte = nibble | from_lane_xor(nibble, 16) << 4;
  word = byte | from_lane_xor(byte, 1) << 8;
  scale = scale_bits(product(products, inverse_of(squares)));
}

// Writes a token's numbers to a slot of codes.
template <uint DIM>
void encode_slot(Slots slots, uint token, uint lane, THREAD const float* x) {
  uint words = slot_words(slots.format, GROUP);
  DEVICE ushort* slot = (DEVICE ushort*)slots.numbers + token * slot_words(slots.format, DIM);
  DEVICE ushort* scales = (DEVICE ushort*)slots.scales + token * (DIM / GROUP);
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint word = 0;
    ushort scale = 0;
#ifdef HAS_Q8
    if (slots.format == Q8) encode_q8(x[i], word, scale);
#endif
#ifdef HAS_Q4
    if (slots.format == Q4) encode_q4(x[i], word, scale);
#endif
    if (!(lane & 1) && lane / 2 < words) slot[i * words + lane / 2] = ushort(word);
    if (!lane) scales[i] = scale;
  }
}

// Turns numbers that were held in one way into the basis in which they will be held.
template <uint DIM>
void turn(Slots from, Slots to, uint lane, THREAD float* x) {
  if (from.is_rotated() != to.is_rotated() && DIM % LANES == 0) rotate<DIM>(x, lane);
}

#ifdef HAS_Q4
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
#ifdef HAS_Q4
  if (to.centre) subtract_centre<DIM>(from, to, place, sums, x);
#endif
  if (to.format == FLOATS) write_slot<DIM>(to, token, place.lane, x);
  else encode_slot<DIM>(to, token, place.lane, x);
}
#endif

// Floats of threadgroup memory that `copy_side` takes.
#ifdef HAS_Q4
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
  uint words = slot_words(from.format, DIM), scales = DIM / GROUP;
  for (uint i = place.lane; i < words; i += LANES)
    ((DEVICE ushort*)to.numbers)[token * words + i] = from.numbers[token * words + i];
  for (uint i = place.lane; from.format != FLOATS && i < scales; i += LANES)
    ((DEVICE ushort*)to.scales)[token * scales + i] = from.scales[token * scales + i];
#ifdef HAS_Q4
  for (uint i = place.lane; token == 0 && from.centre && i < DIM; i += LANES)
    ((DEVICE ushort*)to.centre)[i] = from.centre[i];
#endif
}
