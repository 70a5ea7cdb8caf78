// Products of 8x8 matrices of a simdgroup, on the matrix units: the matrix code of prefill.
//
// A lane has two numbers of a matrix that lie side by side, in this order, on which MLX's own
// kernels rely too (mlx/backend/metal/kernels/steel/attn/mma.h). Factors are floats, as there.

CONSTANT uint SIMDGROUP_ROWS = 8;  // query rows of a simdgroup
CONSTANT uint LANE_ROWS = 1;       // of which a lane has numbers
CONSTANT uint MATRIX_NUMBERS = 8;  // of each query in a matrix
// A row's columns 0 and 1 are in one lane, 2 and 3 in the lane with this bit changed, 4 to 7 in
// those with the other.
CONSTANT uint COLUMN_LANE_2 = 1, COLUMN_LANE_4 = 8;

typedef metal::simdgroup_float8x8 Matrix;

uint row_in_matrix(uint lane, uint) { return (lane / 4 & 4) + lane / 2 % 4; }
uint column_in_matrix(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

Matrix matrix_of(float x, float y) {
  Matrix matrix;
  thread float2& pair = reinterpret_cast<thread float2&>(matrix.thread_elements());
  pair.x = x;
  pair.y = y;
  return matrix;
}

void add_product(Matrix a, Matrix b, thread float* sums) {
  Matrix sum = matrix_of(sums[0], sums[1]);
  metal::simdgroup_multiply_accumulate(sum, a, b, sum);
  thread float2& pair = reinterpret_cast<thread float2&>(sum.thread_elements());
  sums[0] = pair.x;
  sums[1] = pair.y;
}

// Adds the products of 8 numbers of queries with those of keys [TILE_TOKENS, STRIDE].
void add_products(Matrix queries, threadgroup const T* keys, uint lane, thread float* logits) {
  uint row = row_in_matrix(lane, 0), column = column_in_matrix(lane);
  UNROLL
  for (uint n = 0; n < TILE_TOKENS / 8; n++) {
    threadgroup const T* key = keys + (n * 8 + column) * STRIDE + row;
    add_product(queries, matrix_of(float(key[0]), float(key[STRIDE])), logits + n * 2);
  }
}

// Of queries [8, K_DIM + PAD] with keys [TILE_TOKENS, STRIDE].
void multiply_with_keys(threadgroup const T* queries, threadgroup const T* keys, uint lane,
                        thread float* logits) {
  threadgroup const T* query = queries + row_in_matrix(lane, 0) * (K_DIM + PAD) + column_in_matrix(lane);
  UNROLL
  for (uint i = 0; i < TILE_TOKENS / 4; i++) logits[i] = 0.0f;
  for (uint d = 0; d < K_DIM; d += MATRIX_NUMBERS)
    add_products(matrix_of(float(query[d]), float(query[d + 1])), keys + d, lane, logits);
}

// The same for queries in device memory, of which a lane has those of its rows: the numbers
// first, first + step and so on of every MATRIX_NUMBERS.
void add_products_in_memory(const thread Query* queries, uint dim, uint first, uint step,
                            threadgroup const T* keys, uint lane, thread float* logits) {
  for (uint d = first * MATRIX_NUMBERS; d < dim; d += step * MATRIX_NUMBERS) {
    uint at = d + column_in_matrix(lane);
    Matrix query = matrix_of(float(queries[0].number(at)), float(queries[0].number(at + 1)));
    add_products(query, keys + d, lane, logits);
  }
}

// Adds the products of weights with WIDTH columns of values [TILE_TOKENS, STRIDE].
void add_weighted(threadgroup const T* values, uint lane, const thread float* weights,
                  thread float* sums) {
  uint row = row_in_matrix(lane, 0), column = column_in_matrix(lane);
  UNROLL
  for (uint n = 0; n < TILE_TOKENS / 8; n++) {
    threadgroup const T* from = values + (n * 8 + row) * STRIDE + column;
    Matrix weight = matrix_of(weights[n * 2], weights[n * 2 + 1]);
    UNROLL
    for (uint i = 0; i < WIDTH / 8; i++)
      add_product(weight, matrix_of(float(from[i * 8]), float(from[i * 8 + 1])), sums + i * 2);
  }
}
