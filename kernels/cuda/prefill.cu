  // On paper, for heads of 128 on an H200, as in decode.cu: 128 threads, 4 warps with 16 of 64 query
  // rows each. Shared memory: queries 64 * 136 * 2 bytes and a tile of 32 * 136 * 2, 26 KiB; with heads
  // of 256 64 * 264 * 2 and 16 * 264 * 2, 42 KiB of the 48 that a kernel has without asking.
  // Registers: values 64, logits 16, operands 6, addresses about 30: 116, so 4 blocks a
  // multiprocessor. A tile is 1.05 MFLOP for 16 KiB, 64 FLOP a byte. mma.sync reaches about 60 % of
  // what Hopper's wgmma does, and tiles are not loaded while the one before is computed: within twice
  // the time of a tuned flash attention is an aim, and not what the arithmetic promises.
  // Heads of 512 (WIDE), as in metal/prefill.metal: 256 threads, of which two warps share 16 of 64 rows. Shared
  // memory: a tile of 16 KiB, and logits of 8 warps, 8 KiB. Registers: sums 128, and NVRTC gives up to 222, with
  // codes 252, and spills none, so one block a multiprocessor.
  // As vectors, so that they lie at multiples of 16 bytes.
#ifdef WIDE
  __shared__ float logits_here[paged_kv::THREADS * paged_kv::LOGITS];
#else
  __shared__ float4 queries_here[paged_kv::BLOCK_ROWS * (paged_kv::K_DIM + paged_kv::PAD) / 8];
#endif
  __shared__ float4 tile_numbers[paged_kv::TILE_TOKENS * paged_kv::STRIDE / 8];
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
                    (paged_kv::T*)queries_here,
#endif
                    (paged_kv::T*)tile_numbers,
#ifdef PARTIAL
                    partials, measures);
#else
                    output);
#endif
