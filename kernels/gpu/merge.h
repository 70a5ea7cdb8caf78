// Joins the parts of attention that `decode` leaves: a simdgroup takes one query head of one row.

namespace paged_kv {

// `number` is of the query head among those of all rows; sinks are natural logarithms.
template <typename T, uint DIM>
inline void merge(DEVICE const float* partials, DEVICE const float* measures,
                  DEVICE const float* sinks, DEVICE const int* params, uint head, uint number,
                  uint lane, DEVICE T* output) {
  uint splits = uint(params[SPLITS]), bases = uint(params[BASES_OF_VALUES]);
  ulong first = number * ulong(bases * splits);
  float above = LOWEST, sink = NEVER;
  for (uint i = lane; i < bases * splits; i += LANES)
    above = larger(above, measures[(first + i) * 2]);
  if (params[HAS_SINKS]) sink = sinks[head] * LOG2_E;
  above = larger(largest_of_lanes(above), sink);
  float total = params[HAS_SINKS] ? power_of_2(sink - above) : 0.0f;
  float all[numbers_of_lane(DIM)];
  for (uint i = 0; i < numbers_of_lane(DIM); i++) all[i] = 0.0f;
  // The rotated first: what is turned back with them is only theirs.
  for (uint basis = bases; basis-- > 0;) {
    for (uint split = 0; split < splits; split++) {
      ulong slot = first + basis * splits + split;
      float weight = power_of_2(measures[slot * 2] - above);
      total = multiply_add(weight, measures[slot * 2 + 1], total);
      for (uint i = 0; i < numbers_of_lane(DIM); i++) {
        uint at = i * LANES + lane;
        if (at < DIM) all[i] = multiply_add(weight, partials[slot * DIM + at], all[i]);
      }
    }
    if (DIM % LANES == 0 && uint(params[FIRST_BASIS]) + basis == 1) rotate<DIM>(all, lane);
  }
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + lane;
    if (at < DIM) output[number * DIM + at] = T(total > 0.0f ? all[i] / total : 0.0f);
  }
}

}  // namespace paged_kv
