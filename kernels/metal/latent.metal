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
  //   Groups (IN_GROUPS), for 16 heads (DeepSeek-V2-Lite) of 16 sequences behind 8,192 tokens:
  //     Loads: 64 query rows are 4 sequences, so 9.4 MB are read 4 times, and not 16 times. With more than
  //       32 heads a threadgroup has less than 2 sequences; it still loads a quarter, because the other
  //       kernel has 16 rows. Twice as many rows would need more registers than a core has.
  //     Arithmetic: 4.6 GFLOP, 0.33 ms at the peak, where 16 times 9.4 MB are 0.38 ms if all comes from
  //       memory. A row takes 272 bytes of threadgroup memory a token, and not 4,352: of matrices, each
  //       number serves 8 rows, and it has 16 bits.
  //     Queries: 74 KB for each tile of 16 tokens, from the cache: memory has 0.3 MB of them. So the
  //       cache gives 90 bytes for a row and token, where it gave 72.
  //     Threadgroup memory: 16 tokens of 584 numbers, 18 KiB, and logits of 16 simdgroups, 8 KiB.
  //     Registers: sums 64, logits 4, operands 4, addresses about 24: 96 of 104, for 512 threads.
  //     Results: 16 * 16 * 514 * 4 bytes for 4 pages of 295 KB: written and read, 6 % of what 15 reads take.
#ifdef IN_GROUPS
  // As vectors, so that they lie at multiples of 16 bytes.
  threadgroup float4 tile_numbers[paged_kv::TILE_TOKENS * paged_kv::STRIDE / 8];
  threadgroup float logits_here[paged_kv::THREADS * paged_kv::LOGITS];
  paged_kv::attend_latent_groups(queries, queries_strides, position_queries, position_queries_strides,
                                 groups, partials, measures, pages, place,
                                 (threadgroup paged_kv::T*)tile_numbers, logits_here);
#else
  threadgroup float tile_here[paged_kv::SIMDGROUPS * paged_kv::TOKEN];
  paged_kv::attend_latent(queries, queries_strides, position_queries, position_queries_strides,
                          partials, measures, pages, place, tile_here);
#endif
