  // On paper: a simdgroup for each query head. It reads parts * (D + 2) * 4 bytes, and has 2 D / 32
  // numbers in registers and no threadgroup memory. 128 parts of 128 numbers are 67 KB, of which a
  // lane reads 4 numbers at a time: about 10 us, behind 340 us of reading 32K tokens.
  uint number = threadgroup_position_in_grid.y * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
  paged_kv::merge<T, V_DIM>(partials, measures, sinks, params, threadgroup_position_in_grid.x,
                            number, thread_index_in_simdgroup, output);
