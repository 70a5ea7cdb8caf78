// Products of matrices on tensor cores: the matrix code of prefill.
//
// kernels/cuda/mma.h says which numbers of a matrix a lane has.

CONSTANT uint SIMDGROUP_ROWS = 16;  // query rows of a warp
CONSTANT uint LANE_ROWS = 2;        // of which a lane has numbers
// A row's columns 0 and 1 are in one lane, 2 and 3 in the lane with this bit changed, 4 to 7 in
// those with the other.
CONSTANT uint COLUMN_LANE_2 = 1, COLUMN_LANE_4 = 2;

uint row_in_matrix(uint lane, uint i) { return lane / 4 + i * 8; }
uint column_in_matrix(uint lane) { return lane % 4 * 2; }

uint pair_of(T low, T high) {
  return bits_of(low) | uint(bits_of(high)) << 16;
}

uint pair_at(const T* numbers) {
  return *(const uint*)numbers;
}

// Of queries [16, K_DIM + PAD] with keys [TILE_TOKENS, STRIDE].
void multiply_with_keys(const T* queries, const T* keys, uint lane, float* logits) {
  uint row = lane / 4, column = lane % 4 * 2;
  UNROLL
  for (uint i = 0; i < TILE_TOKENS / 2; i++) logits[i] = 0.0f;
  for (uint d = 0; d < K_DIM; d += 16) {
    const T* low = queries + row * (K_DIM + PAD) + d + column;
    const T* high = low + 8 * (K_DIM + PAD);
    Pairs4 query = {{pair_at(low), pair_at(high), pair_at(low + 8), pair_at(high + 8)}};
    UNROLL
    for (uint n = 0; n < TILE_TOKENS / 8; n++) {
      const T* key = keys + (n * 8 + row) * STRIDE + d + column;
      multiply_add_matrices(T(0.0f), logits + n * 4, query, Pairs2{{pair_at(key), pair_at(key + 8)}});
    }
  }
}

// Adds the products of weights, rounded to the model's dtype, with values [TILE_TOKENS, STRIDE].
void add_weighted(const T* values, uint lane, const float* weights, float* sums) {
  uint row = lane % 4 * 2, column = lane / 4;
  UNROLL
  for (uint n = 0; n < TILE_TOKENS / 16; n++) {
    Pairs4 weight;
    for (uint i = 0; i < 4; i++)
      weight.a[i] = pair_of(T(weights[n * 8 + i * 2]), T(weights[n * 8 + i * 2 + 1]));
    const T* from = values + (n * 16 + row) * STRIDE + column;
    UNROLL
    for (uint i = 0; i < V_DIM / 8; i++) {
      const T* value = from + i * 8;
      Pairs2 pairs = {{pair_of(value[0], value[STRIDE]),
                       pair_of(value[8 * STRIDE], value[9 * STRIDE])}};
      multiply_add_matrices(T(0.0f), sums + i * 4, weight, pairs);
    }
  }
}
