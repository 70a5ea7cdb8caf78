// Merges the split-KV partials of `decode`: a simdgroup takes one query head of one sequence.

// `number` is of the query head among those of all sequences; `sink` is in base 2.
void merge(DEVICE const float* partials, DEVICE const float* measures,
                  DEVICE const int* params, float sink, uint number, uint lane, DEVICE T* output) {
  uint splits = uint(params[SPLITS]), bases = uint(params[BASES_OF_VALUES]);
  ulong first = number * ulong(bases * splits);
  float above = LOWEST;
  for (uint i = lane; i < bases * splits; i += LANES)
    above = larger(above, measures[(first + i) * 2]);
  above = larger(largest_of_lanes(above), sink);
  float total = power_of_2(sink - above);
  float all[numbers_of_lane(V_DIM)];
  for (uint i = 0; i < numbers_of_lane(V_DIM); i++) all[i] = 0.0f;
  // Rotated partials first, so that only their sum is rotated back.
  for (uint basis = bases; basis-- > 0;) {
    for (uint split = 0; split < splits; split++) {
      ulong slot = first + basis * splits + split;
      float weight = power_of_2(measures[slot * 2] - above);
      total = multiply_add(weight, measures[slot * 2 + 1], total);
      for (uint i = 0; i < numbers_of_lane(V_DIM); i++) {
        uint at = i * LANES + lane;
        if (at < V_DIM) all[i] = multiply_add(weight, partials[slot * V_DIM + at], all[i]);
      }
    }
#ifdef HAS_CODES
    if (uint(params[FIRST_BASIS]) + basis == 1) rotate<V_DIM>(all, lane);
#endif
  }
  store_numbers<V_DIM>(all, total > 0.0f ? 1.0f / total : 0.0f, lane, output + number * V_DIM);
}
