// Attention of a step of queries, on matrix units.
//
// A simdgroup keeps the weighted values of its rows in registers, and their maximum and sum of weights
// in base 2. Of each matrix of 8 columns a lane has two adjacent ones, in one row or two: number
// (matrix * LANE_ROWS + row) * 2 + column of its arrays.
//
// Rotated values are summed first, and their sum is rotated back in registers before the plain ones
// are added.

// Reductions over the four lanes that share a row.
float largest_of_row(float x) {
  x = larger(x, from_lane_xor(x, COLUMN_LANE_2));
  return larger(x, from_lane_xor(x, COLUMN_LANE_4));
}

float sum_of_row(float x) {
  x += from_lane_xor(x, COLUMN_LANE_2);
  return x + from_lane_xor(x, COLUMN_LANE_4);
}

void exchange_lanes(THREAD float* x, uint count, uint mask, uint lane) {
  for (uint i = 0; i < count; i++) {
    float other = from_lane_xor(x[i], mask);
    x[i] = lane & mask ? other - x[i] : x[i] + other;
  }
}

// Sums and differences of numbers that lie `distance` apart.
void exchange_numbers(THREAD float* x, uint count, uint distance, float scale) {
  for (uint i = 0; i < count; i++)
    if (!(i & distance)) {
      float a = x[i], b = x[i + distance];
      x[i] = (a + b) * scale;
      x[i + distance] = (a - b) * scale;
    }
}

// Rotates the rows, or rotates them back.
void rotate_rows(THREAD float* x, uint lane) {
  constexpr uint COUNT = V_DIM / 4 * LANE_ROWS, MATRIX = 2 * LANE_ROWS;
  exchange_numbers(x, COUNT, 1, 1.0f / root(float(rotated_block(V_DIM))));
  exchange_lanes(x, COUNT, COLUMN_LANE_2, lane);
  exchange_lanes(x, COUNT, COLUMN_LANE_4, lane);
  UNROLL
  for (uint h = 1; h < rotated_block(V_DIM) / 8; h *= 2) exchange_numbers(x, COUNT, h * MATRIX, 1.0f);
}

struct Softmax {
  float values[WIDTH / 4 * LANE_ROWS];
  float maximum[LANE_ROWS], sum[LANE_ROWS];  // the sum is of the lane's columns
#ifdef HAS_SOFTCAP
  float softcap;
#endif

  void clear() THREAD {
    for (uint i = 0; i < LANE_ROWS; i++) maximum[i] = LOWEST, sum[i] = 0.0f;
    for (uint i = 0; i < WIDTH / 4 * LANE_ROWS; i++) values[i] = 0.0f;
  }

  void scale_row(uint i, float factor) THREAD {
    UNROLL
    for (uint n = 0; n < WIDTH / 8; n++) {
      values[(n * LANE_ROWS + i) * 2] *= factor;
      values[(n * LANE_ROWS + i) * 2 + 1] *= factor;
    }
  }

  // Turns a row's logits into weights, and rescales the earlier sums to the new maximum.
  void weigh(uint i, uint begin, uint end, Tile tile, uint lane, THREAD float* logits) THREAD {
    uint column = tile.position + column_in_matrix(lane);
    end = smaller(end, tile.end);
    float above = maximum[i];
    UNROLL
    for (uint n = 0; n < TILE_TOKENS / 4; n++) {
      uint at = column + n / 2 * 8 + n % 2, number = (n / 2 * LANE_ROWS + i) * 2 + n % 2;
#ifdef HAS_SOFTCAP
      logits[number] = capped(logits[number], softcap);
#endif
      if (at < begin || at >= end) logits[number] = NEVER;
      above = larger(above, logits[number]);
    }
    above = largest_of_row(above);
    float factor = power_of_2(maximum[i] - above);
    maximum[i] = above;
    sum[i] *= factor;
    scale_row(i, factor);
    UNROLL
    for (uint n = 0; n < TILE_TOKENS / 4; n++) {
      uint number = (n / 2 * LANE_ROWS + i) * 2 + n % 2;
      logits[number] = power_of_2(logits[number] - above);
      sum[i] += logits[number];
    }
  }

  // `sink` is in base 2.
  void finish(uint i, float sink) THREAD {
    float above = larger(maximum[i], sink), factor = power_of_2(maximum[i] - above);
    float total = multiply_add(sum_of_row(sum[i]), factor, power_of_2(sink - above));
    scale_row(i, total > 0.0f ? factor / total : 0.0f);
  }

  template <typename To>
  void store(uint i, bool is_there, uint lane, DEVICE To* to) THREAD {
    UNROLL
    for (uint n = 0; n < WIDTH / 4; n++) {
      float number = values[(n / 2 * LANE_ROWS + i) * 2 + n % 2];
      to[n / 2 * 8 + column_in_matrix(lane) + n % 2] = To(is_there ? number : 0.0f);
    }
  }
};

// The tiles that a threadgroup reads: those of pages, then those of unwritten keys and values.
struct Tiles {
  uint in_pages;  // positions
  uint first, count, first_new, count_new;
  Own new_tokens;
};

Tiles tiles_of(Block block, uint length, Own new_tokens) {
  uint in_pages = length - (new_tokens.end - new_tokens.begin), end = smaller(block.end, in_pages);
  Tiles tiles = {in_pages, block.begin / TILE_TOKENS, 0, 0, 0, new_tokens};
  if (end > block.begin) tiles.count = (end + TILE_TOKENS - 1) / TILE_TOKENS - tiles.first;
  if (block.begin > in_pages) tiles.first_new = (block.begin - in_pages) / TILE_TOKENS;
  if (block.end > in_pages)
    tiles.count_new = (block.end - in_pages + TILE_TOKENS - 1) / TILE_TOKENS - tiles.first_new;
  return tiles;
}

Tile tile_of(Tiles tiles, Block block, uint i) {
  if (i < tiles.count) {
    uint at = (tiles.first + i) * TILE_TOKENS;
    return {false, at % PAGE_SIZE, at, block.begin, smaller(block.end, tiles.in_pages)};
  }
  uint at = (tiles.first_new + i - tiles.count) * TILE_TOKENS;
  return {true, tiles.new_tokens.begin + at, tiles.in_pages + at, block.begin, block.end};
}

// What a threadgroup reads, and for which rows.
struct Work {
  Rows rows;
  DEVICE const int* table;
  Block block;
  Tiles tiles;
};

#ifdef IN_GROUPS
Work work_of(const THREAD Pages& pages, const THREAD Place& place, DEVICE const int* groups) {
  DEVICE const int* group = groups + place.z * GROUP_FIELDS;
  Rows rows = {group, place.x * BLOCK_ROWS};
  Block block = block_of_group(pages, rows);
  // Of any of the sequences: they have the same pages here.
  DEVICE const int* table = pages.row(group[2] < 0 ? 0 : uint(group[2]));
  return {rows, table, block, tiles_of(block, block.end, Own{0, 0, 0})};
}
#else
Work work_of(const THREAD Pages& pages, const THREAD Place& place) {
  DEVICE const int* table = pages.row(place.z);
  Rows rows = {place.z, place.x * BLOCK_ROWS};
  Block block = block_of(pages, table, own_tokens(table, pages.parameter(STEPS)), rows.first);
  Own new_tokens = own_tokens(table, pages.parameter(NEW_TOKENS));
  return {rows, table, block, tiles_of(block, uint(table[ROW_LENGTH]), new_tokens)};
}
#endif

// Outputs what a simdgroup has of the rows from `first_row` on, in the columns from `first_column` on.
#ifdef SINKS
template <typename Strides, typename Sinks>
#endif
void give_rows(THREAD Softmax& softmax, Rows rows, uint first_row, uint first_column,
#ifdef SINKS
               DEVICE const Sinks* sinks, Strides s_strides,
#endif
               const THREAD Pages& pages, const THREAD Place& place,
#ifdef PARTIAL
               DEVICE float* partials, DEVICE float* measures) {
#else
               DEVICE T* output) {
#endif
  uint lane = place.lane;
  for (uint k = 0; k < LANE_ROWS; k++) {
    QueryRow row = query_row(pages, rows, first_row + row_in_matrix(lane, k));
    uint head = place.y * pages.parameter(GQA_GROUP_SIZE) + row.head;
    ulong at = (row.place * ulong(pages.parameter(Q_HEADS)) + head) * pages.parameter(STEPS) + row.step;
#ifdef PARTIAL
    float total = sum_of_row(softmax.sum[k]);
    if (!row.has_place) continue;
    if (first_column + column_in_matrix(lane) == 0)
      measures[at * 2] = softmax.maximum[k], measures[at * 2 + 1] = total;
    softmax.store(k, true, lane, partials + at * V_DIM + first_column);
#else
#ifdef SINKS
    softmax.finish(k, float(sinks[head * ulong(s_strides[0])]) * LOG2_E);
#else
    softmax.finish(k, NEVER);
#endif
    if (row.has_place) softmax.store(k, row.is_there, lane, output + at * V_DIM + first_column);
#endif
  }
}

#ifdef SINKS
template <typename Strides, typename Sinks>
#else
template <typename Strides>
#endif
void prefill(DEVICE const T* queries, Strides strides,
#ifdef HAS_NEW_TOKENS
             DEVICE const T* new_keys, Strides k_strides, DEVICE const T* new_values,
             Strides v_strides,
#endif
#ifdef SINKS
             DEVICE const Sinks* sinks, Strides s_strides,
#endif
#ifdef IN_GROUPS
             DEVICE const int* groups,
#endif
             const THREAD Pages& pages, const THREAD Place& place, SHARED T* all_queries,
#ifdef PARTIAL
             SHARED T* tile_numbers, DEVICE float* partials, DEVICE float* measures) {
#else
             SHARED T* tile_numbers, DEVICE T* output) {
#endif
#ifdef IN_GROUPS
  Work work = work_of(pages, place, groups);
#else
  Work work = work_of(pages, place);
#endif
  Rows rows = work.rows;
  uint lane = place.lane, first_row = place.simdgroup * SIMDGROUP_ROWS;
  SHARED T* own = all_queries + place.simdgroup * SIMDGROUP_ROWS * (K_DIM + PAD);
  Softmax softmax;
  softmax.clear();
  uint begins[LANE_ROWS], ends[LANE_ROWS];
  for (uint k = 0; k < LANE_ROWS; k++) {
    QueryRow row = query_row(pages, rows, first_row + row_in_matrix(lane, k));
    begins[k] = row.begin, ends[k] = row.end;
  }
#ifdef HAS_SOFTCAP
  softmax.softcap = float_of_bits(pages.parameter(SOFTCAP));
#endif
  stage_rows(queries, strides, pages, rows, place, false, own);
#ifdef HAS_CODES
  bool queries_rotated = false;
  // The rotated values, if there may be any, then the plain ones.
  for (uint pass = 0; pass < 2; pass++) {
#endif
    for (uint i = 0; i < work.tiles.count + work.tiles.count_new; i++) {
      Tile tile = tile_of(work.tiles, work.block, i);
      uint entry = tile.is_new ? 0 : uint(work.table[ROW_FIELDS + tile.position / PAGE_SIZE]);
      Slots values = pages.slots(entry, place.y, V_DIM, true);
      Slots keys = pages.slots(entry, place.y, K_DIM, false);
#ifdef HAS_CODES
      if ((values.is_rotated() && !tile.is_new) != (pass == 0)) continue;
      bool keys_rotated = keys.is_rotated() && !tile.is_new;
      if (keys_rotated != queries_rotated)
        stage_rows(queries, strides, pages, rows, place, keys_rotated, own);
      queries_rotated = keys_rotated;
#endif
      float logits[TILE_TOKENS / 4 * LANE_ROWS];
#ifdef HAS_NEW_TOKENS
      load_tile<K_DIM>(tile, keys, new_keys, k_strides, place, tile_numbers);
#else
      load_tile<K_DIM>(tile, keys, place, tile_numbers);
#endif
      multiply_with_keys(own, tile_numbers, lane, logits);
      for (uint k = 0; k < LANE_ROWS; k++) softmax.weigh(k, begins[k], ends[k], tile, lane, logits);
#ifdef HAS_NEW_TOKENS
      load_tile<V_DIM>(tile, values, new_values, v_strides, place, tile_numbers);
#else
      load_tile<V_DIM>(tile, values, place, tile_numbers);
#endif
      add_weighted(tile_numbers, lane, logits, softmax.values);
    }
#ifdef HAS_CODES
    if (pass == 0 && V_DIM % LANES == 0) rotate_rows(softmax.values, lane);
  }
#endif
  give_rows(softmax, rows, first_row, 0,
#ifdef SINKS
            sinks, s_strides,
#endif
            pages, place,
#ifdef PARTIAL
            partials, measures);
#else
            output);
#endif
}
