  // On paper, for the layer of metal/latent.metal on an H200: 132 multiprocessors, 4.8 TB/s, 67 TFLOP/s in
  // float32, 64K registers and 227 KiB of shared memory each.
  //   Bytes: 32K tokens are 38 MB, 8 us.
  //   Arithmetic: 9.1 GFLOP are 0.14 ms at the peak. Tensor cores would make it an order faster: this kernel
  //     is for the memory that it saves.
  //   Occupancy: 256 threads of about 96 registers, and 18 KiB of shared memory: 2 blocks a multiprocessor.
  __shared__ float tile_here[paged_kv::SIMDGROUPS * paged_kv::TOKEN];
  paged_kv::attend_latent(queries, queries_strides, position_queries, position_queries_strides,
                          partials, measures, pages, place, tile_here);
