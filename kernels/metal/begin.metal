  // Of every kernel; the arguments are those of kernels/gpu/kernels.py.
  const paged_kv::Place place = {threadgroup_position_in_grid.x,   threadgroup_position_in_grid.y,
                                 threadgroup_position_in_grid.z,   simdgroup_index_in_threadgroup,
                                 thread_index_in_simdgroup,        thread_index_in_threadgroup};
  const paged_kv::Pages pages = {{{slab0, slab1, slab2, slab3, slab4, slab5, slab6, slab7, slab8,
                                   slab9, slab10, slab11, slab12, slab13, slab14, slab15}},
                                 layouts, tables, params};
  if (place.x + place.y + place.z == 0 && place.index < 8) done[place.index] = 0;
