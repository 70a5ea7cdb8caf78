// Writes a step's keys and values to pages of floats. A simdgroup takes one slot: a token's keys, or values, of
// one head.

CONSTANT uint SLOT_SIMDGROUPS = 4;

// Numbers of a token of a step, which may lie anywhere: [batch, heads, steps, dim] with strides.
template <uint DIM, typename Strides>
void read_step(DEVICE const T* step, Strides strides, uint row, uint head, uint token,
                      uint lane, THREAD float* x) {
  ulong first = row * ulong(strides[0]) + head * ulong(strides[1]) + token * ulong(strides[2]);
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + lane;
    x[i] = at < DIM ? float(step[first + at * ulong(strides[3])]) : 0.0f;
  }
}

template <uint DIM, typename Strides>
void write_step(DEVICE const T* step, Strides strides, const THREAD Pages& pages,
                       const THREAD Place& place, bool values) {
  DEVICE const int* row = pages.row(place.z / 2);
  Own own = own_tokens(row, pages.parameter(STEPS));
  uint token = place.x * SLOT_SIMDGROUPS + place.simdgroup;
  if (token < own.begin || token >= own.end) return;
  uint position = own.position + token - own.begin;
  uint entry = uint(row[ROW_FIELDS + position / PAGE_SIZE]);
  float x[numbers_of_lane(DIM)];
  read_step<DIM>(step, strides, place.z / 2, place.y, token, place.lane, x);
  write_slot<DIM>(pages.slots(entry, place.y, DIM, values), position % PAGE_SIZE, place.lane, x);
}
