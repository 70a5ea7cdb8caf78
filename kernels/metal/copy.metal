  // On paper: a simdgroup for each slot, 4 in a threadgroup, no threadgroup memory. A page of 8 heads
  // of 128 in 16 bits is 1 MiB, read and written: 5 us at 400 GB/s. Between formats a lane has D / 32
  // numbers, as in write.metal.
  if (place.z % 2 == 0) {
    paged_kv::copy_side<paged_kv::K_DIM>(pages, place, false);
  } else {
    paged_kv::copy_side<paged_kv::V_DIM>(pages, place, true);
  }
