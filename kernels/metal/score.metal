  // On paper, for 8 KV heads of 128 with 4 query heads each on an M3 Max, see decode.metal.
  //   Bytes: a summary is 2 * 128 * 2 = 512 for 32 tokens of one KV head, an eighth of what their keys take
  //     in q8, and a 32nd of their keys and values in 16 bits. 32K tokens are 4 MiB a layer, 10 us, beside
  //     340 us to read them all. Scores: 4 floats for each 32 tokens, 128 KiB.
  //   Threads: 8 simdgroups a threadgroup, a page each, so 128 threadgroups at 32K tokens: 25 simdgroups for
  //     each core. Lanes read 16 bytes, and four lanes 64 that lie side by side.
  //   Threadgroup memory: 4 queries and their squares, 2 * 128 floats each: 4 KiB. 16 at most.
  //   Registers: sums 4 to 8, 8 numbers of a summary and 8 of a query, addresses about 16: below 48.
  //   Arithmetic: 4 multiply-adds for each number of 2 bytes, as decode.
  // As vectors, so that they lie at multiples of 16 bytes.
  threadgroup float4 staged_here[paged_kv::ROWS * paged_kv::SUMMARY / 4];
  paged_kv::score(queries, queries_strides, pages, place, (threadgroup float*)staged_here, scores);
