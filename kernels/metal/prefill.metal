  threadgroup T queries_here[paged_kv::BLOCK_ROWS * (K_DIM + paged_kv::PAD)];
  threadgroup T tile_numbers[paged_kv::tile_tokens(K_DIM, V_DIM) * paged_kv::tile_row(K_DIM, V_DIM)];
  paged_kv::prefill<T, K_DIM, V_DIM, FORMATS>(
      queries, queries_strides, tail_keys, tail_keys_strides, tail_values, tail_values_strides, sinks,
      pages, place, queries_here, tile_numbers, output);
