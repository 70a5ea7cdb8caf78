  // On paper: a simdgroup for each slot, 4 in a threadgroup. A page of 8 heads of 128 in 16 bits is
  // 1 MiB, read and written: 5 us at 400 GB/s. Between formats a lane has D / 32 numbers; q4 takes 16
  // exchanges between lanes for each group of 32 numbers, a rotation 5 for each number. A slot of D
  // numbers is 34 D / 32 bytes in q8. In q4 one of 128 values is 68, one of 128 keys 82, and keys have 2 D more for
  // each head and page.
  //   Centres of keys in q4: 64 threadgroups of a head each read its page's keys, 64 KiB of 128 numbers in
  //     16 bits. That is 32 MiB for 8 heads: 0.08 ms if it came from memory, once in 256 tokens. A lane
  //     has D / 32 sums more, and a threadgroup 16 D bytes of memory: 2 KiB, or 8 with latents of 512.
  threadgroup float sums_here[paged_kv::COPY_SUMS];
  if (place.z % 2 == 0) {
    paged_kv::copy_side<paged_kv::K_DIM>(pages, place, false, sums_here);
  } else {
    paged_kv::copy_side<paged_kv::V_DIM>(pages, place, true, sums_here);
  }
