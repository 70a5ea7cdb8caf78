  // On paper, for 8 KV heads of 128 with 4 query heads each on an H200: 132 multiprocessors, 4.8 TB/s,
  // 67 TFLOP/s in float32, 64K registers and 227 KiB of shared memory each.
  //   Bytes: as in metal/decode.metal. 8 rows of 32K tokens are 1.07 GB in 16 bits, 0.22 ms.
  //   Threads: 8 warps a block, which share a part's tiles; 128 parts are 8 warps a multiprocessor. More
  //     rows make more of them.
  //   Registers: NVRTC gives up to 128, so 16 warps a multiprocessor; shared memory 8 KiB a block. With 8 query
  //     heads a warp 141 to 176, so 8 warps. With heads of 512 136 to 168 for 4 warps a block: 12 warps; 24 KiB a block.
  //   In flight (benches/kernel_resources.py): to fill 4.8 TB/s over 600 ns takes 22 KiB a multiprocessor. 16 warps ask
  //     for 2 KiB of keys or more of values each in 16 bits, 32 KiB; in q4 for 1 KiB, 16 KiB.
  //   Arithmetic: 2 multiply-adds a byte in 16 bits are 19 TFLOP/s at full bandwidth, three tenths of
  //     the peak. In q4 they are 7 a byte, which alone takes the peak. A tile takes a warp 1,900 instructions in 16
  //     bits and 2,900 in q4: at 132 * 4 a cycle and 1.8 GHz, the tokens of 5.3 TB/s in 16 bits. So q4 is expected
  //     about as fast as 16 bits at full bandwidth, and faster where that is not reached. More would take
  //     the tensor cores.
  // As vectors, so that they lie at multiples of 16 bytes.
  __shared__ float4 queries_here[paged_kv::BLOCKS * paged_kv::ROWS * paged_kv::STAGED / 4];
  __shared__ float own_here[paged_kv::PARTS * paged_kv::BLOCKS * paged_kv::OWN];
  __shared__ float measures_here[paged_kv::PARTS * paged_kv::BLOCKS * paged_kv::ROWS * 2];
  paged_kv::decode(queries, queries_strides,
#ifdef STEP
                   keys, keys_strides, values, values_strides,
#endif
#ifdef CHOSEN
                   runs,
#endif
#ifdef WHOLE
#ifdef SINKS
                   sinks, sinks_strides,
#endif
                   output,
#else
                   partials, measures,
#endif
                   pages, place, (float*)queries_here, own_here, measures_here);
