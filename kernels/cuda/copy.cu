  // On paper: as metal/copy.metal; a warp for each slot.
  if (place.z % 2 == 0) {
    paged_kv::copy_side<paged_kv::K_DIM>(pages, place, false);
  } else {
    paged_kv::copy_side<paged_kv::V_DIM>(pages, place, true);
  }
