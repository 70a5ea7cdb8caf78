  // As vectors, so that they lie at multiples of 16 bytes.
  threadgroup float4 queries_here[BLOCKS * ROWS * K_DIM / 4 * (FORMATS == 1 ? 1 : 2)];
  threadgroup float weights[PARTS * BLOCKS * 32 * ROWS];
  paged_kv::decode<T, K_DIM, V_DIM, ROWS, BLOCKS, PARTS, FORMATS>(
      queries, queries_strides, pages, place, (threadgroup float*)queries_here, weights, partials,
      measures);
