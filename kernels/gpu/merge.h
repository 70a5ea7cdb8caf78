// Merges partial results of a query: the split-KV partials of `decode`, or those of `prefill`.
// AFTER_PREFIX also those of the groups that read pages for several sequences. A simdgroup takes one
// query of one head of one sequence.

// The largest maximum of some partial results, for all lanes.
float largest_measure(DEVICE const float* measures, ulong first, uint stride, uint count, uint lane) {
  float above = LOWEST;
  for (uint i = lane; i < count; i += LANES)
    above = larger(above, measures[(first + i * ulong(stride)) * 2]);
  return largest_of_lanes(above);
}

// Adds some partial results, scaled to a maximum, to a sum of weights and of weighted values.
float add_partials(DEVICE const float* partials, DEVICE const float* measures, ulong first, uint stride,
                   uint count, float above, uint lane, float total, THREAD float* all) {
  for (uint k = 0; k < count; k++) {
    ulong slot = first + k * ulong(stride);
    float weight = power_of_2(measures[slot * 2] - above);
    total = multiply_add(weight, measures[slot * 2 + 1], total);
    for (uint i = 0; i < numbers_of_lane(V_DIM); i++) {
      uint at = i * LANES + lane;
      if (at < V_DIM) all[i] = multiply_add(weight, partials[slot * V_DIM + at], all[i]);
    }
  }
  return total;
}

// `query` is one of the `queries` of a sequence; `sink` is in base 2.
void merge(DEVICE const float* partials, DEVICE const float* measures,
#ifdef AFTER_PREFIX
           DEVICE const float* prefix_partials, DEVICE const float* prefix_measures,
           DEVICE const int* tables,
#endif
           DEVICE const int* params, float sink, uint sequence, uint query, uint queries, uint lane,
           DEVICE T* output) {
  uint splits = uint(params[SPLITS]);
  ulong number = sequence * ulong(queries) + query, first = number * splits;
  float above = larger(largest_measure(measures, first, 1, splits, lane), sink);
#ifdef AFTER_PREFIX
  DEVICE const int* row = tables + sequence * params[TABLE_STRIDE];
  ulong prefix = uint(row[FIRST_PLACE]) * ulong(queries) + query;
  uint places = uint(row[PLACES]);
  above = larger(above, largest_measure(prefix_measures, prefix, queries, places, lane));
#endif
  float total = power_of_2(sink - above);
  float all[numbers_of_lane(V_DIM)];
  for (uint i = 0; i < numbers_of_lane(V_DIM); i++) all[i] = 0.0f;
  total = add_partials(partials, measures, first, 1, splits, above, lane, total, all);
#ifdef AFTER_PREFIX
  total = add_partials(prefix_partials, prefix_measures, prefix, queries, places, above, lane, total, all);
#endif
  store_numbers<V_DIM>(all, total > 0.0f ? 1.0f / total : 0.0f, lane, output + number * V_DIM);
}
