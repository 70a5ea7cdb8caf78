  // On paper, for 128 query heads, latents of 512 and position keys of 64 (DeepSeek-V3) on an M3 Max: 40
  // cores, 400 GB/s, 14 TFLOP/s in float32, 208 KiB of registers and 60 KiB of threadgroup memory a core.
  //   Bytes: a token is 576 * 2 = 1,152 in 16 bits. 32K tokens are 38 MB a layer, 0.09 ms; 8 groups of 16
  //     heads each read them, all but the first from the cache.
  //   Arithmetic: 128 * (576 + 512) multiply-adds a token are 9.1 GFLOP for 32K tokens: 0.65 ms at the
  //     peak. So arithmetic is the limit, and simdgroup matrices would be faster than this.
  //   Threadgroup memory: 8 tokens of 576 floats, 18 KiB. A lane reads each number of a token twice for
  //     each of its heads: neighbouring lanes read neighbouring floats.
  //   Registers: for each head 18 numbers of the query and 16 sums; two heads take 68, logits 8, addresses
  //     about 16.
  threadgroup float tile_here[paged_kv::SIMDGROUPS * paged_kv::TOKEN];
  paged_kv::attend_latent(queries, queries_strides, position_queries, position_queries_strides,
                          partials, measures, pages, place, tile_here);
