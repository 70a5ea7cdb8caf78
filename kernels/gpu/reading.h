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

// COUNT numbers of a slot, 2, 4 or 8, from a multiple of COUNT on.
template <uint FORMAT, uint DIM, uint COUNT>
void read_some(Slots slots, uint token, uint at, THREAD float* x) {
  DEVICE const ushort* slot = slots.numbers + token * slot_words(FORMAT, DIM);
  uint words[4];
#ifdef HAS_FLOATS
  if (FORMAT == FLOATS) {
    load<COUNT * 2>(slot + at, words);
    for (uint i = 0; i < COUNT; i++) x[i] = number_of(ushort(words[i / 2] >> i % 2 * 16));
    return;
  }
#endif
#ifdef HAS_CODES
  float scale = float_of_half(slots.scales[token * (DIM / GROUP) + at / GROUP]);
  load<COUNT>(slot + (FORMAT == Q8 ? at / 2 : at / GROUP * 8 + at % 16 / 2), words);
  for (uint i = 0; i < (COUNT + 3) / 4; i++) words[i] = FORMAT == Q8 ? words[i] ^ 0x80808080u : words[i] >> (at & 16) / 4;
  // A code above its least one is the last bits of a float from 2^23 on: both differ by the code,
  // without a conversion of integers, which GPUs do at a half or a quarter of the rate of others.
  const float least = FORMAT == Q8 ? 8388608.0f + 128.0f : 8388608.0f + 8.0f;
  for (uint i = 0; i < COUNT; i++) {
    uint above = words[i / 4] >> i % 4 * 8 & (FORMAT == Q8 ? 255u : 15u);
    x[i] = (float_of_bits(0x4b000000u | above) - least) * scale;
  }
#endif
}
