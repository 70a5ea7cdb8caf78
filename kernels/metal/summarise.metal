  // On paper: a simdgroup for each 32 keys of a head, 4 in a threadgroup, no threadgroup memory. It reads
  // 64 D bytes, and once more from the cache, and writes 4 D. A lane has 3 D / 32 numbers. A page of 8 heads
  // of 128 is 64 simdgroups and 512 KiB: 1.3 us at 400 GB/s, so it takes as long as a launch does. A
  // sequence that is decoded fills a page in 256 steps; a prefill step of 2,048 tokens fills 8, 10 us.
  paged_kv::summarise(pages, place);
