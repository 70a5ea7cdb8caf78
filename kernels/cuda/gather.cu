  // On paper: as metal/gather.metal; a warp for each row.
  if (place.z % 2 == 0) {
    paged_kv::gather_side<T, K_DIM>(tail_keys, tail_keys_strides, pages, place, false, keys);
  } else {
    paged_kv::gather_side<T, V_DIM>(tail_values, tail_values_strides, pages, place, true, values);
  }
