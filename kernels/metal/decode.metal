  // On paper, for 8 KV heads of 128 with 4 query heads each (Llama 3 8B) on an M3 Max: 40 cores,
  // 400 GB/s, 14 TFLOP/s in float32, 208 KiB of registers and 60 KiB of threadgroup memory a core.
  //   Bytes: a token is 2 * 128 * 2 = 512 in one KV head in 16 bits, 272 in q8, 150 in q4, and the centre
  //     of a page's keys in q4 another 256, 1 for each token. 32K tokens are 134 MB a layer in 16 bits,
  //     0.34 ms. Parts: 16 for each head, 4 * 130 * 4 bytes each, 0.27 MB written and read again: 0.4 %.
  //   Threads: 256 a threadgroup, 8 simdgroups that share a part's tiles; 128 parts of 8 are 25
  //     simdgroups for each core. A context of up to 1,024 tokens is one part: 4 tiles for each
  //     simdgroup, and neither partial results nor a second launch.
  //   Threadgroup memory: 4 queries of 128 floats, 2 KiB, as much again rotated; weights 8 * 32 * 4
  //     floats, 4 KiB, where later the values of one query head are, one after the other: 8 KiB, so
  //     7 threadgroups fit a core and registers decide.
  //   A step: a simdgroup of the first part turns a key and a value into what their page will hold,
  //     which takes as long as in write.metal; the other 7 are reading tiles meanwhile.
  //   Registers: values 16, products 16, maxima and sums 8, two keys' and a query's numbers 20 beside their
  //     words, or the words of 8 values, 16; addresses about 16: 92 of 32 bits, so 18 simdgroups a core. With 8 query
  //     heads 132, and 12.
  //   Heads of 512: 4 query heads a simdgroup have 64 values, so 120 registers, and 13 simdgroups fit a core.
  //     4 simdgroups have 8 KiB for weights and values; with queries, 16 KiB for 8 heads in 16 bits or for 4
  //     that are rotated too, 24 of the 32 KiB that a threadgroup may have: 2 of 4 simdgroups a core.
  //   Arithmetic: 4 * 256 multiply-adds a token are 2 a byte in 16 bits: 1.6 TFLOP/s at full bandwidth,
  //     a ninth of the peak. In q4 they are 7 a byte, and about 5 instructions a byte more unpack
  //     codes: close to the peak, so q4 is expected 2.5 to 3 times as fast as 16 bits, not 3.5.
  //   In flight: 400 GB/s over 600 ns are 6 KB a core, which nobody has published for this GPU. 16 simdgroups
  //     ask for 2 KiB each in 16 bits; in q4 for 1 KiB of keys, and then for 0.5 of values.
  //   Centres of keys in q4: for each tile and query head a lane multiplies and adds 4 numbers, where the
  //     tile's keys and values take it 256, and the simdgroup sums once. To add the centre to each key
  //     would take a lane 128 additions.
  //   Tiles: 32 tokens, so that softmax has one for each lane, and one maximum of the simdgroup for 32
  //     tokens. Keys are read 32 bytes side by side by two lanes, a sector of the cache; values a slot,
  //     256 bytes, by the simdgroup.
  // As vectors, so that they lie at multiples of 16 bytes.
  threadgroup float4 queries_here[paged_kv::BLOCKS * paged_kv::ROWS * paged_kv::STAGED / 4];
  threadgroup float own_here[paged_kv::PARTS * paged_kv::BLOCKS * paged_kv::OWN];
  threadgroup float measures_here[paged_kv::PARTS * paged_kv::BLOCKS * paged_kv::ROWS * 2];
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
                   pages, place, (threadgroup float*)queries_here, own_here, measures_here);
