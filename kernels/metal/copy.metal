  // On paper: a simdgroup for each slot, 4 in a threadgroup, no threadgroup memory. A page of 8 heads
  // of 128 in 16 bits is 1 MiB, read and written: 5 us at 400 GB/s. Between formats a lane has D / 32
  // numbers; q4 takes 30 exchanges between lanes for each group of 32 numbers, a rotation 5 for each
  // number. A slot of D numbers is 34 D / 32 bytes in q8, 18 D / 32 in q4.
  if (place.z % 2 == 0) {
    paged_kv::copy_side<paged_kv::K_DIM>(pages, place, false);
  } else {
    paged_kv::copy_side<paged_kv::V_DIM>(pages, place, true);
  }
