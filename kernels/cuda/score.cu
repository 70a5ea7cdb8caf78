  // On paper: as metal/score.metal; a warp for each page. 8 rows of 32K tokens are 34 MB a layer, 7 us at
  // 4.8 TB/s, and 1,024 blocks of 8 warps.
  // As vectors, so that they lie at multiples of 16 bytes.
  __shared__ float4 staged_here[paged_kv::ROWS * paged_kv::SUMMARY / 4];
  paged_kv::score(queries, queries_strides, pages, place, (float*)staged_here, scores);
