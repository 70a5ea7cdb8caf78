// Attention of a step of queries on 8x8 matrices of a simdgroup.
//
// A threadgroup takes 32 query rows of one KV head, so that keys and values that it has read serve
// all of them: row r is query r / ratio of the step, head r % ratio of the group. A simdgroup takes
// 8 of the rows, and keeps their weighted values in registers. Keys of 16 or 32 tokens, then their
// values, are turned into the model's dtype in threadgroup memory; such a tile lies in one page.
//
// A lane has two numbers of a matrix that lie side by side, in this order, on which MLX's own
// kernels rely too (mlx/backend/metal/kernels/steel/attn/mma.h).
//
// Values that are rotated are summed first, and the sum is turned back in the registers: with the
// 8x8 Hadamard matrix, and by sums and differences of whole matrices.

namespace paged_kv {

constexpr uint BLOCK_ROWS = 32;
constexpr uint PAD = 8;  // numbers behind a row, so that rows begin in different banks

constexpr uint tile_tokens(uint k_dim, uint v_dim) { return k_dim > 128 || v_dim > 128 ? 16 : 32; }
constexpr uint tile_row(uint k_dim, uint v_dim) { return (k_dim > v_dim ? k_dim : v_dim) + PAD; }

typedef metal::simdgroup_float8x8 Matrix;

inline uint matrix_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
inline uint matrix_column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

inline THREAD float2& pair_of(THREAD Matrix& matrix) {
  return reinterpret_cast<THREAD float2&>(matrix.thread_elements());
}

inline void fill(THREAD Matrix& matrix, float number) {
  pair_of(matrix).x = number;
  pair_of(matrix).y = number;
}

inline void scale_by(THREAD Matrix& matrix, float factor) {
  pair_of(matrix).x *= factor;
  pair_of(matrix).y *= factor;
}

// Over the four lanes that have a row of a matrix.
inline float largest_of_row(float x) {
  x = larger(x, from_lane_xor(x, 1));
  return larger(x, from_lane_xor(x, 8));
}

inline float sum_of_row(float x) {
  x += from_lane_xor(x, 1);
  return x + from_lane_xor(x, 8);
}

// Turns rows that matrices hold side by side into the other basis.
template <uint DIM>
inline void rotate_matrices(THREAD Matrix* x, uint lane) {
  constexpr uint COUNT = DIM / 8, BLOCK = rotated_block(DIM) / 8;
  uint row = matrix_row(lane), column = matrix_column(lane);
  float scale = 1.0f / root(float(rotated_block(DIM)));
  Matrix hadamard, nothing;
  fill(nothing, 0.0f);
  pair_of(hadamard).x = metal::popcount(row & column) & 1 ? -scale : scale;
  pair_of(hadamard).y = metal::popcount(row & (column + 1)) & 1 ? -scale : scale;
  UNROLL
  for (uint i = 0; i < COUNT; i++)
    metal::simdgroup_multiply_accumulate(x[i], x[i], hadamard, nothing);
  UNROLL
  for (uint h = 1; h < BLOCK; h *= 2)
    for (uint i = 0; i < COUNT; i++)
      if (!(i & h)) {
        float2 a = pair_of(x[i]), b = pair_of(x[i + h]);
        pair_of(x[i]) = a + b;
        pair_of(x[i + h]) = a - b;
      }
}

// What a lane's row of queries sees.
struct QueryRow {
  uint step, head;     // of the step, of the group
  bool is_there;       // not padding
  uint begin, end;     // positions that it sees
};

// What a threadgroup's rows see together; nothing where all are padding.
struct Block {
  Own own;
  uint first_row, length, begin, end;
};

inline uint first_seen(uint position, uint window) {
  return window && position >= window ? position - window + 1 : 0;
}

inline Block block_of(const THREAD Pages& pages, DEVICE const int* row, uint first_row) {
  uint steps = pages.parameter(STEPS), ratio = pages.parameter(RATIO);
  Block block = {own_tokens(row, steps), first_row, uint(row[0]), 0, 0};
  uint first = first_row / ratio, last = (first_row + BLOCK_ROWS - 1) / ratio + 1;
  first = metal::max(first, block.own.begin);
  last = metal::min(last, block.own.end);
  if (first >= last) return block;
  uint position = block.own.position + first - block.own.begin;
  block.begin = first_seen(position, pages.parameter(WINDOW));
  block.end = pages.parameter(CAUSAL) ? position + last - first : block.length;
  return block;
}

inline QueryRow query_row(const THREAD Pages& pages, Block block, uint number) {
  uint ratio = pages.parameter(RATIO), step = number / ratio;
  QueryRow row = {step, number % ratio, step >= block.own.begin && step < block.own.end, 0, 0};
  if (!row.is_there) return row;
  uint position = block.own.position + step - block.own.begin;
  row.begin = first_seen(position, pages.parameter(WINDOW));
  row.end = pages.parameter(CAUSAL) ? position + 1 : block.length;
  return row;
}

// A simdgroup's own 8 queries, in base 2, in the basis of the keys.
template <typename T, uint DIM, typename Strides>
inline void stage_rows(DEVICE const T* queries, Strides strides, const THREAD Pages& pages,
                       Block block, const THREAD Place& place, bool rotated, SHARED T* staged) {
  float scale = float_of_bits(pages.parameter(SCALE));
  lanes_meet();
  for (uint r = 0; r < 8; r++) {
    QueryRow row = query_row(pages, block, block.first_row + place.simdgroup * 8 + r);
    ulong head = place.y * pages.parameter(RATIO) + row.head;
    DEVICE const T* query = queries + place.z * ulong(strides[0]) + head * ulong(strides[1]);
    float x[numbers_of_lane(DIM)];
    for (uint i = 0; i < numbers_of_lane(DIM); i++) {
      uint at = i * LANES + place.lane;
      bool is_there = row.is_there && at < DIM;
      ulong number = row.step * ulong(strides[2]) + at * ulong(strides[3]);
      x[i] = is_there ? float(query[number]) * scale : 0.0f;
    }
    if (rotated) rotate<DIM>(x, place.lane);
    for (uint i = 0; i < numbers_of_lane(DIM); i++) {
      uint at = i * LANES + place.lane;
      if (at < DIM) staged[r * (DIM + PAD) + at] = T(x[i]);
    }
  }
  lanes_meet();
}

// Tokens of a tile: in a page from `first` on, or of the step; those outside [begin, end) are not
// read, and zeros stand for them.
struct Tile {
  bool in_tail;
  uint first, position, begin, end;
};

template <typename T, uint FORMATS>
inline void read_any(Rows rows, uint token, uint octet, uint dim, THREAD float* x) {
  DEVICE const ushort* row = rows.numbers + token * row_words(rows.format, dim);
  DEVICE const ushort* scales = rows.scales + token * (dim / GROUP);
  if (FORMATS & mask_of(FLOATS) && rows.format == FLOATS) read_octet<T, FLOATS>(row, scales, octet, x);
  if (FORMATS & mask_of(Q8) && rows.format == Q8) read_octet<T, Q8>(row, scales, octet, x);
  if (FORMATS & mask_of(Q4) && rows.format == Q4) read_octet<T, Q4>(row, scales, octet, x);
}

// Keys or values of a tile, by all threads of the threadgroup.
template <typename T, uint DIM, uint TOKENS, uint STRIDE, uint FORMATS, typename Strides>
inline void load_tile(Tile tile, Rows rows, DEVICE const T* tail, Strides strides,
                      const THREAD Place& place, SHARED T* to) {
  threads_meet();
  for (uint i = place.index; i < TOKENS * (DIM / 8); i += BLOCK_ROWS * 4) {
    uint token = i / (DIM / 8), octet = i % (DIM / 8), position = tile.position + token;
    float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    bool is_there = position >= tile.begin && position < tile.end;
    if (is_there && !tile.in_tail) read_any<T, FORMATS>(rows, tile.first + token, octet, DIM, x);
    if (is_there && tile.in_tail) {
      ulong first = place.z * ulong(strides[0]) + place.y * ulong(strides[1]) +
                    (tile.first + token) * ulong(strides[2]);
      for (uint k = 0; k < 8; k++) x[k] = float(tail[first + (octet * 8 + k) * ulong(strides[3])]);
    }
    for (uint k = 0; k < 8; k++) to[token * STRIDE + octet * 8 + k] = T(x[k]);
  }
  threads_meet();
}

// 8 query rows' softmax so far.
template <typename T, uint K_DIM, uint V_DIM>
struct Rows8 {
  Matrix values[V_DIM / 8];
  float maximum, sum;  // of the lane's row; the sum is only of the lane's columns

  inline void clear() THREAD {
    maximum = LOWEST;
    sum = 0.0f;
    for (uint i = 0; i < V_DIM / 8; i++) fill(values[i], 0.0f);
  }

  template <uint TOKENS, uint STRIDE>
  inline void multiply(SHARED const T* queries, SHARED const T* keys, uint lane,
                       THREAD Matrix* logits) THREAD {
    uint row = matrix_row(lane), column = matrix_column(lane);
    UNROLL
    for (uint n = 0; n < TOKENS / 8; n++) fill(logits[n], 0.0f);
    for (uint d = 0; d < K_DIM; d += 8) {
      Matrix query, key;
      pair_of(query).x = float(queries[row * (K_DIM + PAD) + d + column]);
      pair_of(query).y = float(queries[row * (K_DIM + PAD) + d + column + 1]);
      UNROLL
      for (uint n = 0; n < TOKENS / 8; n++) {
        SHARED const T* from = keys + (n * 8 + column) * STRIDE + d + row;
        pair_of(key).x = float(from[0]);
        pair_of(key).y = float(from[STRIDE]);
        metal::simdgroup_multiply_accumulate(logits[n], query, key, logits[n]);
      }
    }
  }

  // Logits become weights, and what was summed so far is put into the same measure.
  template <uint TOKENS>
  inline void weigh(QueryRow row, Tile tile, uint lane, THREAD Matrix* logits) THREAD {
    uint begin = row.begin, end = metal::min(row.end, tile.end);
    float above = maximum;
    UNROLL
    for (uint n = 0; n < TOKENS / 8; n++) {
      uint at = tile.position + n * 8 + matrix_column(lane);
      THREAD float2& pair = pair_of(logits[n]);
      pair.x = at >= begin && at < end ? pair.x : NEVER;
      pair.y = at + 1 >= begin && at + 1 < end ? pair.y : NEVER;
      above = larger(above, larger(pair.x, pair.y));
    }
    above = largest_of_row(above);
    float factor = power_of_2(maximum - above);
    maximum = above;
    sum *= factor;
    UNROLL
    for (uint i = 0; i < V_DIM / 8; i++) scale_by(values[i], factor);
    UNROLL
    for (uint n = 0; n < TOKENS / 8; n++) {
      THREAD float2& pair = pair_of(logits[n]);
      pair.x = power_of_2(pair.x - above);
      pair.y = power_of_2(pair.y - above);
      sum += pair.x + pair.y;
    }
  }

  template <uint TOKENS, uint STRIDE>
  inline void add(SHARED const T* rows, uint lane, THREAD Matrix* weights) THREAD {
    uint row = matrix_row(lane), column = matrix_column(lane);
    for (uint n = 0; n < TOKENS / 8; n++) {
      SHARED const T* from = rows + (n * 8 + row) * STRIDE + column;
      UNROLL
      for (uint i = 0; i < V_DIM / 8; i++) {
        Matrix value;
        pair_of(value).x = float(from[i * 8]);
        pair_of(value).y = float(from[i * 8 + 1]);
        metal::simdgroup_multiply_accumulate(values[i], weights[n], value, values[i]);
      }
    }
  }

  // `sink` is in base 2.
  inline void finish(float sink) THREAD {
    float above = larger(maximum, sink), factor = power_of_2(maximum - above);
    float total = multiply_add(sum_of_row(sum), factor, power_of_2(sink - above));
    float by = total > 0.0f ? factor / total : 0.0f;
    for (uint i = 0; i < V_DIM / 8; i++) scale_by(values[i], by);
  }
};

template <typename T, uint K_DIM, uint V_DIM, uint FORMATS, typename QStrides, typename KStrides,
          typename VStrides>
inline void prefill(DEVICE const T* queries, QStrides q_strides, DEVICE const T* tail_keys,
                    KStrides k_strides, DEVICE const T* tail_values, VStrides v_strides,
                    DEVICE const float* sinks, const THREAD Pages& pages, const THREAD Place& place,
                    SHARED T* all_queries, SHARED T* tile_numbers, DEVICE T* output) {
  constexpr uint TOKENS = tile_tokens(K_DIM, V_DIM), STRIDE = tile_row(K_DIM, V_DIM);
  DEVICE const int* table = pages.row(place.z);
  Block block = block_of(pages, table, place.x * BLOCK_ROWS);
  Own tail_own = own_tokens(table, pages.parameter(TAIL));
  uint in_pages = block.length - (tail_own.end - tail_own.begin);
  uint number = block.first_row + place.simdgroup * 8 + matrix_row(place.lane);
  QueryRow row = query_row(pages, block, number);
  SHARED T* own = all_queries + place.simdgroup * 8 * (K_DIM + PAD);
  Rows8<T, K_DIM, V_DIM> rows;
  rows.clear();
  bool queries_rotated = false;
  stage_rows<T, K_DIM>(queries, q_strides, pages, block, place, false, own);
  uint first_tile = block.begin / TOKENS, tiles = (metal::min(block.end, in_pages) + TOKENS - 1) / TOKENS;
  uint first_tail = block.begin > in_pages ? (block.begin - in_pages) / TOKENS : 0;
  uint tail_tiles = block.end > in_pages ? (block.end - in_pages + TOKENS - 1) / TOKENS : 0;
  if (tiles < first_tile) tiles = first_tile;
  if (tail_tiles < first_tail) tail_tiles = first_tail;
  uint count = tiles - first_tile, all = count + tail_tiles - first_tail;
  // The rotated values, if there may be any, and then the others.
  for (uint pass = FORMATS == 1 ? 1 : 0; pass < 2; pass++) {
    bool rotated = pass == 0;
    for (uint i = 0; i < all; i++) {
      bool in_tail = i >= count;
      uint at = (in_tail ? first_tail + i - count : first_tile + i) * TOKENS;
      Tile tile = {in_tail, in_tail ? tail_own.begin + at : at % PAGE_SIZE,
                   in_tail ? in_pages + at : at, block.begin,
                   in_tail ? block.end : metal::min(block.end, in_pages)};
      uint entry = in_tail ? 0 : uint(table[ROW_FIELDS + at / PAGE_SIZE]);
      Rows values = pages.rows(entry, place.y, V_DIM, true);
      if ((values.rotated && !in_tail) != rotated) continue;
      Rows keys = pages.rows(entry, place.y, K_DIM, false);
      bool keys_rotated = keys.rotated && !in_tail;
      if (FORMATS != 1 && keys_rotated != queries_rotated) {
        stage_rows<T, K_DIM>(queries, q_strides, pages, block, place, keys_rotated, own);
        queries_rotated = keys_rotated;
      }
      load_tile<T, K_DIM, TOKENS, STRIDE, FORMATS>(tile, keys, tail_keys, k_strides, place,
                                                   tile_numbers);
      Matrix logits[TOKENS / 8];
      rows.template multiply<TOKENS, STRIDE>(own, tile_numbers, place.lane, logits);
      rows.template weigh<TOKENS>(row, tile, place.lane, logits);
      load_tile<T, V_DIM, TOKENS, STRIDE, FORMATS>(tile, values, tail_values, v_strides, place,
                                                   tile_numbers);
      rows.template add<TOKENS, STRIDE>(tile_numbers, place.lane, logits);
    }
    if (rotated && V_DIM % LANES == 0) rotate_matrices<V_DIM>(rows.values, place.lane);
  }
  uint steps = pages.parameter(STEPS), ratio = pages.parameter(RATIO);
  uint head = place.y * ratio + row.head;
  rows.finish(pages.parameter(HAS_SINKS) ? sinks[head] * 1.44269504088896340736f : NEVER);
  if (row.step >= steps) return;
  ulong first = ((place.z * pages.parameter(Q_HEADS) + head) * ulong(steps) + row.step) * V_DIM;
  for (uint i = 0; i < V_DIM / 8; i++) {
    ulong at = first + i * 8 + matrix_column(place.lane);
    float2 pair = pair_of(rows.values[i]);
    output[at] = T(row.is_there ? pair.x : 0.0f);
    output[at + 1] = T(row.is_there ? pair.y : 0.0f);
  }
}

}  // namespace paged_kv
