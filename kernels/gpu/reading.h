// Several numbers of a token's row at once, as attention reads them.

namespace paged_kv {

// Numbers behind a row in threadgroup memory, so that rows begin in different banks.
CONSTANT uint PAD = 8;

// Which formats a kernel is compiled for: the rest of its code would only take registers.
constexpr uint mask_of(uint format) { return format == FLOATS ? 1 : format == Q8 ? 2 : 4; }

// Numbers [8 * octet, 8 * octet + 8) of a row.
template <typename T, uint FORMAT>
inline void read_octet(DEVICE const ushort* row, DEVICE const ushort* scales, uint octet,
                       THREAD float* x) {
  if (FORMAT == FLOATS) {
    uint4 packed = *(DEVICE const uint4*)(row + octet * 8);
    const uint words[4] = {packed.x, packed.y, packed.z, packed.w};
    for (uint i = 0; i < 8; i++) x[i] = number_of<T>(ushort(words[i / 2] >> i % 2 * 16));
    return;
  }
  float scale = float_of_half(scales[octet / 4]);
  uint at = FORMAT == Q8 ? octet * 4 : octet / 4 * 8 + octet % 2 * 4;
  uint2 packed = *(DEVICE const uint2*)(row + at);
  const uint words[2] = {packed.x, packed.y};
  for (uint i = 0; i < 8; i++) {
    uint byte = words[i / 4] >> i % 4 * 8;
    int code = FORMAT == Q8 ? int(byte << 24) >> 24 : int(byte >> (octet & 2) * 2 & 15) - 8;
    x[i] = float(code) * scale;
  }
}

// COUNT numbers of a row, 2 or 4, from a multiple of COUNT on.
template <typename T, uint FORMAT, uint COUNT>
inline void read_some(DEVICE const ushort* row, DEVICE const ushort* scales, uint at,
                      THREAD float* x) {
  if (FORMAT == FLOATS) {
    uint words[2];
    if (COUNT == 4) {
      uint2 packed = *(DEVICE const uint2*)(row + at);
      words[0] = packed.x;
      words[1] = packed.y;
    } else {
      words[0] = *(DEVICE const uint*)(row + at);
    }
    for (uint i = 0; i < COUNT; i++) x[i] = number_of<T>(ushort(words[i / 2] >> i % 2 * 16));
    return;
  }
  float scale = float_of_half(scales[at / GROUP]);
  DEVICE const ushort* codes = row + (FORMAT == Q8 ? at / 2 : at / GROUP * 8 + at % 16 / 2);
  uint word = COUNT == 4 ? *(DEVICE const uint*)codes : uint(*codes);
  for (uint i = 0; i < COUNT; i++) {
    uint byte = word >> i * 8;
    int code = FORMAT == Q8 ? int(byte << 24) >> 24 : int(byte >> (at & 16) / 4 & 15) - 8;
    x[i] = float(code) * scale;
  }
}

}  // namespace paged_kv
