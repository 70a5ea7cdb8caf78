  // On paper. A simdgroup takes a slot of D numbers: it reads 2 D bytes, and writes as many. A threadgroup
  // is 4 slots, 128 threads, with no memory of its own. A lane has D / 32 numbers, and about 20
  // registers beside. A decode step of 8 KV heads is 16 slots: it takes as long as a launch does. A
  // prefill step of 2,048 tokens moves 16 MiB, 0.04 ms at 400 GB/s (M3 Max).
  if (place.z % 2 == 0) {
    paged_kv::write_step<paged_kv::K_DIM>(keys, keys_strides, pages, place, false);
  } else {
    paged_kv::write_step<paged_kv::V_DIM>(values, values_strides, pages, place, true);
  }
