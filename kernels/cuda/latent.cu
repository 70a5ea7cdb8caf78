  // On paper, for the layer of metal/latent.metal on an H200: 132 multiprocessors, 4.8 TB/s, 67 TFLOP/s in
  // float32, 64K registers and 227 KiB of shared memory each.
  //   Bytes: 32K tokens are 38 MB, 8 us.
  //   Arithmetic: 9.1 GFLOP are 0.14 ms at the peak. Tensor cores would make it an order faster: this kernel
  //     is for the memory that it saves.
  //   Occupancy: 256 threads of 127 registers, as NVRTC gives, and 18 KiB of shared memory: 2 blocks a multiprocessor.
  //   Groups (IN_GROUPS), for 16 heads of 16 sequences behind 8,192 tokens: 4.6 GFLOP are 68 us in float32
  //     and 5 us on tensor cores, at their peaks. 16 times 9.4 MB are 31 us from memory, 4 times 8 us. 32
  //     threadgroups of 256 threads leave most multiprocessors idle, as groups of 4 pages do at 8,192
  //     tokens. Shared memory: a tile of 18 KiB, and logits of 8 warps, 8 KiB. Registers: NVRTC gives a
  //     thread up to 227 and spills none, so one block a multiprocessor.
#ifdef IN_GROUPS
  // As vectors, so that they lie at multiples of 16 bytes.
  __shared__ float4 tile_numbers[paged_kv::TILE_TOKENS * paged_kv::STRIDE / 8];
  __shared__ float logits_here[paged_kv::THREADS * paged_kv::LOGITS];
  paged_kv::attend_latent_groups(queries, queries_strides, position_queries, position_queries_strides,
                                 groups, partials, measures, pages, place,
                                 (paged_kv::T*)tile_numbers, logits_here);
#else
  __shared__ float tile_here[paged_kv::SIMDGROUPS * paged_kv::TOKEN];
  paged_kv::attend_latent(queries, queries_strides, position_queries, position_queries_strides,
                          partials, measures, pages, place, tile_here);
#endif
