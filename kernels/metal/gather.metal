  // On paper: a simdgroup for each slot, 4 in a threadgroup, no threadgroup memory. It reads a slot as it
  // is held, and writes 2 D bytes: 4K tokens of 8 heads of 128 are 16 MiB each way, 0.08 ms at
  // 400 GB/s. It serves models that look at keys and values themselves.
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
