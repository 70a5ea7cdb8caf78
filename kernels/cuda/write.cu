  // On paper: as metal/write.metal; a warp for each slot.
  if (place.z % 2 == 0) {
    paged_kv::write_step<paged_kv::K_DIM>(keys, keys_strides, pages, place, false);
  } else {
    paged_kv::write_step<paged_kv::V_DIM>(values, values_strides, pages, place, true);
  }
