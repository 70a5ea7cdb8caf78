  // On paper, for 8 KV heads of 128 with 4 query heads each (Llama 3 8B) on an M3 Max: 40 cores,
  // 400 GB/s, 14 TFLOP/s in float32, 208 KiB of registers and 60 KiB of threadgroup memory a core.
  //   Bytes: a token is 2 * 128 * 2 = 512 in one KV head in 16 bits, 272 in q8, 144 in q4. 32K tokens
  //     are 134 MB a layer in 16 bits, 0.34 ms. Parts: 128 for each head, 4 * 130 * 4 bytes each,
  //     2.1 MB written and read again: 3 %.
  //   Threads: 128 a threadgroup, 4 simdgroups with a part each; 1,024 parts are 25 for each core.
  //   Threadgroup memory: 4 queries of 128 floats, 2 KiB, as much again rotated; weights 4 * 32 * 4
  //     floats, 2 KiB: 6 KiB, so 10 threadgroups fit a core and registers decide.
  //   Registers: values 16, products 8, maxima and sums 8, two keys' and a query's 8 numbers 24,
  //     addresses about 16: 72 of 32 bits, so 22 simdgroups a core. With 8 query heads 104, and 16.
  //   Arithmetic: 4 * 256 multiply-adds a token are 2 a byte in 16 bits: 1.6 TFLOP/s at full bandwidth,
  //     a ninth of the peak. In q4 they are 7 a byte, and about 5 instructions a byte more unpack
  //     codes: close to the peak, so q4 is expected 2.5 to 3 times as fast as 16 bits, not 3.6.
  //   Tiles: 32 tokens, so that softmax has one for each lane, and one maximum of the simdgroup for 32
  //     tokens. Keys are read 32 bytes side by side by two lanes, a sector of the cache; values a row,
  //     256 bytes, by the simdgroup.
  // As vectors, so that they lie at multiples of 16 bytes.
  threadgroup float4 queries_here[BLOCKS * ROWS * K_DIM / 4 * (FORMATS == 1 ? 1 : 2)];
  threadgroup float weights[PARTS * BLOCKS * 32 * ROWS];
  paged_kv::decode<T, K_DIM, V_DIM, ROWS, BLOCKS, PARTS, FORMATS>(
      queries, queries_strides, pages, place, (threadgroup float*)queries_here, weights, partials,
      measures);
