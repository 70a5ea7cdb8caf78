  paged_kv::merge<T, V_DIM>(partials, measures, sinks, params, blockIdx.x,
                            blockIdx.y * gridDim.x + blockIdx.x, threadIdx.x, output);
