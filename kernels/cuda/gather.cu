  // On paper: as metal/gather.metal; a warp for each row.
#ifdef TAIL
  if (place.z % 2 == 0) {
    paged_kv::gather_side<paged_kv::K_DIM>(tail_keys, tail_keys_strides, pages, place, false, keys);
  } else {
    paged_kv::gather_side<paged_kv::V_DIM>(tail_values, tail_values_strides, pages, place, true,
                                           values);
  }
#else
  if (place.z % 2 == 0) {
    paged_kv::gather_side<paged_kv::K_DIM>(pages, place, false, keys);
  } else {
    paged_kv::gather_side<paged_kv::V_DIM>(pages, place, true, values);
  }
#endif
