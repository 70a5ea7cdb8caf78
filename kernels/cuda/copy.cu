  // On paper: as metal/copy.metal; a warp for each slot.
  __shared__ float sums_here[paged_kv::COPY_SUMS];
  if (place.z % 2 == 0) {
    paged_kv::copy_side<paged_kv::K_DIM>(pages, place, false, sums_here);
  } else {
    paged_kv::copy_side<paged_kv::V_DIM>(pages, place, true, sums_here);
  }
