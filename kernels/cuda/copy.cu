  // On paper: as metal/copy.metal; a warp for each slot.
#ifdef HAS_Q4
  __shared__ float sums_here[paged_kv::SLOT_SIMDGROUPS * paged_kv::K_DIM];
  if (place.z % 2 == 0) {
    paged_kv::copy_side<paged_kv::K_DIM>(pages, place, false, sums_here);
  } else {
    paged_kv::copy_side<paged_kv::V_DIM>(pages, place, true, sums_here);
  }
#else
  if (place.z % 2 == 0) {
    paged_kv::copy_side<paged_kv::K_DIM>(pages, place, false);
  } else {
    paged_kv::copy_side<paged_kv::V_DIM>(pages, place, true);
  }
#endif
