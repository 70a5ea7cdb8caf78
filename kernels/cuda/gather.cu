  // On paper: as metal/gather.metal; a warp for each slot.
#ifdef HAS_NEW_TOKENS
  if (place.z % 2 == 0) {
    paged_kv::gather_side<paged_kv::K_DIM>(new_keys, new_keys_strides, pages, place, false, keys);
  } else {
    paged_kv::gather_side<paged_kv::V_DIM>(new_values, new_values_strides, pages, place, true,
                                           values);
  }
#else
  if (place.z % 2 == 0) {
    paged_kv::gather_side<paged_kv::K_DIM>(pages, place, false, keys);
  } else {
    paged_kv::gather_side<paged_kv::V_DIM>(pages, place, true, values);
  }
#endif
