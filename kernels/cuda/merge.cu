  // On paper: as metal/merge.metal; a warp for each query head.
#ifdef SINKS
  // A head's queries of a step follow each other.
  float sink = float(sinks[blockIdx.x / paged_kv::uint(params[paged_kv::STEPS]) * paged_kv::ulong(sinks_strides[0])]) * paged_kv::LOG2_E;
#else
  float sink = paged_kv::NEVER;
#endif
  paged_kv::merge(partials, measures,
#ifdef AFTER_PREFIX
                  prefix_partials, prefix_measures, tables,
#endif
                  params, sink, blockIdx.y, blockIdx.x, gridDim.x, threadIdx.x, output);
