// Products of matrices on tensor cores: the matrix code of prefill.
//
// kernels/cuda/mma.h says which numbers of a matrix a lane has.

CONSTANT uint SIMDGROUP_ROWS = 16;  // query rows of a warp
CONSTANT uint LANE_ROWS = 2;        // of which a lane has numbers
CONSTANT uint MATRIX_NUMBERS = 16;  // of each query in a matrix
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

// Adds the products of 16 numbers of queries with those of keys [TILE_TOKENS, STRIDE].
void add_products(Pairs4 queries, const T* keys, uint lane, float* logits) {
  UNROLL
  for (uint n = 0; n < TILE_TOKENS / 8; n++) {
    const T* key = keys + (n * 8 + lane / 4) * STRIDE + column_in_matrix(lane);
    multiply_add_matrices(T(0.0f), logits + n * 4, queries, Pairs2{{pair_at(key), pair_at(key + 8)}});
  }
}

// Of queries [16, K_DIM + PAD] with keys [TILE_TOKENS, STRIDE].
void multiply_with_keys(const T* queries, const T* keys, uint lane, float* logits) {
  UNROLL
  for (uint i = 0; i < TILE_TOKENS / 2; i++) logits[i] = 0.0f;
  for (uint d = 0; d < K_DIM; d += MATRIX_NUMBERS) {
    const T* low = queries + lane / 4 * (K_DIM + PAD) + d + column_in_matrix(lane);
    const T* high = low + 8 * (K_DIM + PAD);
    add_products({{pair_at(low), pair_at(high), pair_at(low + 8), pair_at(high + 8)}}, keys + d, lane, logits);
  }
}

// The same for queries in device memory, of which a lane has those of its rows: the numbers
// first, first + step and so on of every MATRIX_NUMBERS.
void add_products_in_memory(const Query* queries, uint dim, uint first, uint step, const T* keys,
                            uint lane, float* logits) {
  for (uint d = first * MATRIX_NUMBERS; d < dim; d += step * MATRIX_NUMBERS) {
    Pairs4 query;
    for (uint i = 0; i < 4; i++) {
      uint at = d + column_in_matrix(lane) + i / 2 * 8;
      query.a[i] = pair_of(queries[i % 2].number(at), queries[i % 2].number(at + 1));
    }
    add_products(query, keys + d, lane, logits);
  }
}

// Adds the products of weights, rounded to the model's dtype, with WIDTH columns of values
// [TILE_TOKENS, STRIDE].
void add_weighted(const T* values, uint lane, const float* weights, float* sums) {
  uint row = lane % 4 * 2, column = lane / 4;
  UNROLL
  for (uint n = 0; n < TILE_TOKENS / 16; n++) {
    Pairs4 weight;
    for (uint i = 0; i < 4; i++)
      weight.a[i] = pair_of(T(weights[n * 8 + i * 2]), T(weights[n * 8 + i * 2 + 1]));
    const T* from = values + (n * 16 + row) * STRIDE + column;
    UNROLL
    for (uint i = 0; i < WIDTH / 8; i++) {
      const T* value = from + i * 8;
      Pairs2 pairs = {{pair_of(value[0], value[STRIDE]),
                       pair_of(value[8 * STRIDE], value[9 * STRIDE])}};
      multiply_add_matrices(T(0.0f), sums + i * 4, weight, pairs);
    }
  }
}
