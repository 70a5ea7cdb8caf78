  // On paper: a simdgroup for each query head. It reads parts * (D + 2) * 4 bytes, and has 2 D / 32
  // numbers in registers and no threadgroup memory. 16 parts of 128 numbers are 8 KB, of which a
  // lane reads 4 numbers at a time: about 2 us, behind 340 us of reading 32K tokens.
#ifdef SINKS
  // A head's queries of a step follow each other.
  float sink = float(sinks[threadgroup_position_in_grid.x / uint(params[paged_kv::STEPS]) * ulong(sinks_strides[0])]) * paged_kv::LOG2_E;
#else
  float sink = paged_kv::NEVER;
#endif
  paged_kv::merge(partials, measures,
#ifdef AFTER_PREFIX
                  prefix_partials, prefix_measures, tables,
#endif
                  params, sink, threadgroup_position_in_grid.y, threadgroup_position_in_grid.x, threadgroups_per_grid.x, thread_index_in_simdgroup, output);
