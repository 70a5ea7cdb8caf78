  // On paper: as metal/write.metal; a warp for each row.
  if (place.z % 2 == 0) {
    paged_kv::write_step<T, K_DIM>(keys, keys_strides, pages, place, false);
  } else {
    paged_kv::write_step<T, V_DIM>(values, values_strides, pages, place, true);
  }
