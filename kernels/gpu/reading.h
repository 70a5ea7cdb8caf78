// Several numbers of a token's row at once, as attention reads them.

// Numbers behind a token's in threadgroup memory, so that tokens begin in different banks.
CONSTANT uint PAD = 8;

// Of a tile that a threadgroup turns into the model's dtype: its tokens, and numbers of a token. A
// simdgroup sums WIDTH columns of values; SHARERS of them share the query rows.
#ifdef OF_LATENTS
CONSTANT uint TILE_TOKENS = 16;
CONSTANT uint STRIDE = K_DIM + V_DIM + PAD;
CONSTANT uint WIDTH = K_DIM / SHARERS;
#else
CONSTANT uint TILE_TOKENS = K_DIM > 128 || V_DIM > 128 ? 16 : 32;
CONSTANT uint STRIDE = (K_DIM > V_DIM ? K_DIM : V_DIM) + PAD;
CONSTANT uint WIDTH = V_DIM / SHARERS;
#endif

// 16, 8 or 4 bytes in one load, or 2.
template <uint BYTES>
void load(DEVICE const ushort* from, THREAD uint* words) {
  if (BYTES == 16) {
    uint4 all = *(DEVICE const uint4*)from;
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
  } else if (BYTES == 8) {
    uint2 all = *(DEVICE const uint2*)from;
    words[0] = all.x, words[1] = all.y;
  } else {
    words[0] = BYTES == 4 ? *(DEVICE const uint*)from : uint(*from);
  }
}

// The fifth bits of the group of number `at` of a slot.
template <uint DIM>
uint fifths_at(Slots slots, uint token, uint at) {
  DEVICE const ushort* fifths = slots.scales + token * scale_words(Q5, DIM) + at / GROUP * 2;
  return fifths[0] | uint(fifths[1]) << 16;
}

// Four codes of 5 bits as bytes, from number `at` of a group on.
uint with_fifths(uint lower, uint fifths, uint at) {
  return (lower & 0x0f0f0f0fu) | (fifths >> at / 4 & 0x01010101u) << 4;
}

// The words of COUNT numbers of a slot, 2, 4 or 8, from a multiple of COUNT on.
template <uint FORMAT, uint DIM, uint COUNT>
void load_some(Slots slots, uint token, uint at, THREAD uint* words) {
  DEVICE const ushort* slot = slots.numbers + token * slot_words(FORMAT, DIM);
#ifdef HAS_FLOATS
  if (FORMAT == FLOATS) load<COUNT * 2>(slot + at, words);
#endif
#ifdef HAS_CODES
  if (FORMAT != FLOATS) load<COUNT>(slot + (FORMAT == Q8 ? at / 2 : at / GROUP * 8 + at % 16 / 2), words);
  if (FORMAT == Q4 || FORMAT == Q5)
    for (uint i = 0; i < (COUNT + 3) / 4; i++) words[i] >>= (at & 16) / 4;
#endif
#ifdef HAS_Q5
  if (FORMAT != Q5) return;
  uint fifths = fifths_at<DIM>(slots, token, at);
  for (uint i = 0; i < COUNT / 4; i++) words[i] = with_fifths(words[i], fifths, at % GROUP + i * 4);
#endif
}

// COUNT numbers of their words: floats, or codes, which are yet to be multiplied by their scale. Codes of 4 and 5
// bits are the lower bits of bytes.
template <uint FORMAT, uint COUNT>
void unpack(const THREAD uint* words, THREAD float* x) {
  for (uint i = 0; i < COUNT; i++) {
#ifdef HAS_FLOATS
    if (FORMAT == FLOATS) x[i] = number_of(ushort(words[i / 2] >> i % 2 * 16));
#endif
#ifdef HAS_CODES
    if (FORMAT == FLOATS) continue;
    // A code above its least one is among the last bits of a float from 2^23 on, in its first byte or, 256 times as
    // large, in the second. So it takes no conversion of integers, which GPUs do at a half or a quarter of the rate
    // of others, and every second one takes no shift. The highest of 8 bits tells the sign.
    uint word = words[i / 4] ^ 0x80808080u, two = i % 4 < 2 ? word : word >> 16;
    uint above = two & ((1u << FORMAT) - 1) << i % 2 * 8;
    const float one = i % 2 ? 1 / 256.0f : 1.0f, least = 8388608.0f * one + float(1 << FORMAT - 1);
    x[i] = multiply_add(float_of_bits(0x4b000000u | above), one, -least);
#endif
  }
}

// The scale of number `at` of a slot; 1 for floats.
template <uint FORMAT, uint DIM>
float scale_at(Slots slots, uint token, uint at) {
#ifdef HAS_CODES
  uint first = token * scale_words(FORMAT, DIM) + fifth_words(FORMAT, DIM);
  if (FORMAT != FLOATS) return float_of_half(slots.scales[first + at / scale_group(FORMAT, DIM)]);
#endif
  return 1.0f;
}

// COUNT numbers of a slot, 2, 4 or 8, from a multiple of COUNT on.
template <uint FORMAT, uint DIM, uint COUNT>
void read_some(Slots slots, uint token, uint at, THREAD float* x) {
  uint words[4];
  load_some<FORMAT, DIM, COUNT>(slots, token, at, words);
  unpack<FORMAT, COUNT>(words, x);
  float scale = scale_at<FORMAT, DIM>(slots, token, at);
  for (uint i = 0; i < COUNT; i++) x[i] *= scale;
}
