  // As vectors, so that they lie at multiples of 16 bytes.
  __shared__ float4 queries_here[BLOCKS * ROWS * K_DIM / 4 * (FORMATS == 1 ? 1 : 2)];
  __shared__ float weights[PARTS * BLOCKS * 32 * ROWS];
  paged_kv::decode<T, K_DIM, V_DIM, ROWS, BLOCKS, PARTS, FORMATS>(
      queries, queries_strides, pages, place, (float*)queries_here, weights, partials, measures);
