  // As vectors, so that they lie at multiples of 16 bytes.
  __shared__ float4 queries_here[paged_kv::BLOCK_ROWS * (K_DIM + paged_kv::PAD) / 8];
  __shared__ float4 tile_numbers[paged_kv::tile_tokens(K_DIM, V_DIM) * paged_kv::tile_row(K_DIM, V_DIM) / 8];
  paged_kv::prefill<T, K_DIM, V_DIM, FORMATS>(
      queries, queries_strides, tail_keys, tail_keys_strides, tail_values, tail_values_strides, sinks,
      pages, place, (T*)queries_here, (T*)tile_numbers, output);
