  uint number = threadgroup_position_in_grid.y * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
  paged_kv::merge<T, V_DIM>(partials, measures, sinks, params, threadgroup_position_in_grid.x,
                            number, thread_index_in_simdgroup, output);
