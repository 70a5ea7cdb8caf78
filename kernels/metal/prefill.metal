  // On paper, for heads of 128 with 4 query heads to a KV head on an M3 Max, as in decode.metal.
  //   Threads: 128 a threadgroup, 4 simdgroups with 8 of 32 query rows each. A step of 2,048 tokens is
  //     256 threadgroups for each KV head.
  //   Threadgroup memory: queries 32 * 136 * 2 bytes, tile 32 * 136 * 2: 17 KiB, so 3 threadgroups a
  //     core. With heads of 256: 32 * 264 * 2 and 16 * 264 * 2, 25 KiB of the 32 that one may have.
  //   Registers: values 32, logits 8, operands about 8, addresses and masks about 24: 72. With heads of
  //     256, where tiles are half as long: 64 + 4 + 8 + 24 = 100 of 128.
  //   Heads of 512 (WIDE): 32 queries would take 33 KiB, and 8 rows 128 sums a lane. So 512 threads have 64
  //     rows, and two simdgroups share 8 of them; each sums 256 columns. A tile of 16 * 520 * 2 bytes and
  //     logits of 16 simdgroups, 8 KiB, are 25 KiB. Registers: sums 64, logits 4, operands 4, addresses
  //     about 28: 100 of 104, and as many while a lane turns 16 numbers of a token of codes. A lane makes 2,048 multiply-adds a tile. It loads 32 numbers of keys and values
  //     and 64 of queries, from the cache. To turn codes takes it 160 exchanges and 288 additions.
  //   Arithmetic and bytes: a tile is 2 * 32 * 32 * 128 multiply-adds, 0.52 MFLOP, for 16 KiB of keys
  //     and values: 32 FLOP a byte, at 14 TFLOP/s and 400 GB/s the balance is 35. Threadgroups of
  //     neighbouring rows read the same pages at about the same time, from the cache of 48 MiB.
  //   Tiles: 32 tokens of 16 bits for heads up to 128, 16 above, so that two tiles and the queries
  //     would fit and one does; both divide a page.
  //   Groups (IN_GROUPS): 16 sequences with 4 query heads to a KV head are 64 rows, which take 8
  //     simdgroups and 26 KiB. 8,192 shared tokens of 8 KV heads in 16 bits are 33.5 MB, read once in
  //     0.08 ms instead of 16 times in 1.3; 64 rows are 64 FLOP a byte, so arithmetic takes 0.15 ms. 8
  //     groups of 1,024 tokens are 64 threadgroups, and their results 2 MB.
  // As vectors, so that they lie at multiples of 16 bytes.
#ifdef WIDE
  threadgroup float logits_here[paged_kv::THREADS * paged_kv::LOGITS];
#else
  threadgroup float4 queries_here[paged_kv::BLOCK_ROWS * (paged_kv::K_DIM + paged_kv::PAD) / 8];
#endif
  threadgroup float4 tile_numbers[paged_kv::TILE_TOKENS * paged_kv::STRIDE / 8];
#ifdef WIDE
  paged_kv::prefill_wide(
#else
  paged_kv::prefill(
#endif
                    queries, queries_strides,
#ifdef HAS_NEW_TOKENS
                    new_keys, new_keys_strides, new_values, new_values_strides,
#endif
#ifdef SINKS
                    sinks, sinks_strides,
#endif
#ifdef IN_GROUPS
                    groups,
#endif
                    pages, place,
#ifdef WIDE
                    logits_here,
#else
                    (threadgroup paged_kv::T*)queries_here,
#endif
                    (threadgroup paged_kv::T*)tile_numbers,
#ifdef PARTIAL
                    partials, measures);
#else
                    output);
#endif
