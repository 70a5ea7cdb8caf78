// Copies whole pages, also into other formats. A simdgroup takes one slot: a token's keys, or values,
// of one head. A row of the tables is two entries: from, to.

template <uint DIM>
void copy_side(const THREAD Pages& pages, const THREAD Place& place, bool values) {
  DEVICE const int* pair = pages.row(place.z / 2);
  Slots from = pages.slots(uint(pair[0]), place.y, DIM, values);
  Slots to = pages.slots(uint(pair[1]), place.y, DIM, values);
  uint token = place.x * SLOT_SIMDGROUPS + place.simdgroup;
#ifdef HAS_CODES
  if (from.format != to.format || from.rotated != to.rotated) {
    float x[numbers_of_lane(DIM)];
    read_slot<DIM>(from, token, place.lane, x);
    encode_slot<DIM>(to, token, from.rotated != to.rotated, true, place.lane, x);
    return;
  }
#endif
  uint words = slot_words(from.format, DIM), scales = DIM / GROUP;
  for (uint i = place.lane; i < words; i += LANES)
    ((DEVICE ushort*)to.numbers)[token * words + i] = from.numbers[token * words + i];
  for (uint i = place.lane; from.format != FLOATS && i < scales; i += LANES)
    ((DEVICE ushort*)to.scales)[token * scales + i] = from.scales[token * scales + i];
}
