  // On paper, for 8 KV heads of 128 with 4 query heads each on an H200: 132 multiprocessors, 4.8 TB/s,
  // 67 TFLOP/s in float32, 64K registers and 227 KiB of shared memory each.
  //   Bytes: as in metal/decode.metal. 8 rows of 32K tokens are 1.07 GB in 16 bits, 0.22 ms.
  //   Threads: 4 warps a block, with a part each; 1,024 parts are 8 warps a multiprocessor. More rows
  //     make more of them.
  //   Registers: about 72, so 28 warps a multiprocessor; shared memory 6 KiB a block.
  //   In flight: to fill 4.8 TB/s over 600 ns takes 22 KiB a multiprocessor: 8 warps with two 16-byte
  //     loads a lane are 8 KiB, 28 warps 28 KiB. A batch of 8 has enough, one row may not.
  //   Arithmetic: 2 multiply-adds a byte in 16 bits are 19 TFLOP/s at full bandwidth, three tenths of
  //     the peak. In q4 they are 7 a byte, which alone takes the peak, and unpacking half as long
  //     again: q4 is expected about twice as fast as 16 bits. More would take the tensor cores.
  // As vectors, so that they lie at multiples of 16 bytes.
  __shared__ float4 queries_here[BLOCKS * ROWS * K_DIM / 4 * (FORMATS == 1 ? 1 : 2)];
  __shared__ float weights[PARTS * BLOCKS * 32 * ROWS];
  paged_kv::decode<T, K_DIM, V_DIM, ROWS, BLOCKS, PARTS, FORMATS>(
      queries, queries_strides, pages, place, (float*)queries_here, weights, partials, measures);
