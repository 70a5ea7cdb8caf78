  // On paper: as metal/merge.metal; a warp for each query head.
  paged_kv::merge<T, V_DIM>(partials, measures, sinks, params, blockIdx.x,
                            blockIdx.y * gridDim.x + blockIdx.x, threadIdx.x, output);
