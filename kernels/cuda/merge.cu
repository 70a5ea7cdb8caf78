  // On paper: as metal/merge.metal; a warp for each query head.
#ifdef SINKS
  float sink = float(sinks[blockIdx.x * paged_kv::ulong(sinks_strides[0])]) * paged_kv::LOG2_E;
#else
  float sink = paged_kv::NEVER;
#endif
  paged_kv::merge(partials, measures, params, sink,
                  blockIdx.y * gridDim.x + blockIdx.x, threadIdx.x, output);
