// Plans the work of a threadgroup of prefill, for matrices of any size.
//
// It takes query rows of one KV head, so that keys and values that it has read serve all of them: row r
// is query r / gqa_group_size of the step, head r % gqa_group_size of the group. A simdgroup takes some of the rows.
// Keys of 16 or 32 tokens, then their values, are turned into the model's dtype in threadgroup
// memory; such a tile lies in one page.

CONSTANT uint PREFILL_THREADS = 128;
CONSTANT uint PREFILL_SIMDGROUPS = PREFILL_THREADS / LANES;
CONSTANT uint BLOCK_ROWS = PREFILL_SIMDGROUPS * SIMDGROUP_ROWS;


// The positions that a lane's query row sees.
struct QueryRow {
  uint step, head;     // of the step, of the group
  bool is_there;       // not padding
  uint begin, end;     // positions that it sees
};

// The positions that a threadgroup's rows see together; none if all rows are padding.
struct Block {
  Own own;
  uint first_row, length, begin, end;
};

uint first_seen(uint position, uint window) {
  return window && position >= window ? position - window + 1 : 0;
}

Block block_of(const THREAD Pages& pages, DEVICE const int* row, uint first_row) {
  uint steps = pages.parameter(STEPS), gqa_group_size = pages.parameter(GQA_GROUP_SIZE);
  Block block = {own_tokens(row, steps), first_row, uint(row[0]), 0, 0};
  uint first = first_row / gqa_group_size, last = (first_row + BLOCK_ROWS - 1) / gqa_group_size + 1;
  first = larger(first, block.own.begin);
  last = smaller(last, block.own.end);
  if (first >= last) return block;
  uint position = block.own.position + first - block.own.begin;
  block.begin = first_seen(position, pages.parameter(WINDOW));
  block.end = pages.parameter(CAUSAL) ? position + last - first : block.length;
  return block;
}

QueryRow query_row(const THREAD Pages& pages, Block block, uint number) {
  uint gqa_group_size = pages.parameter(GQA_GROUP_SIZE), step = number / gqa_group_size;
  QueryRow row = {step, number % gqa_group_size, step >= block.own.begin && step < block.own.end, 0, 0};
  if (!row.is_there) return row;
  uint position = block.own.position + step - block.own.begin;
  row.begin = first_seen(position, pages.parameter(WINDOW));
  row.end = pages.parameter(CAUSAL) ? position + 1 : block.length;
  return row;
}

// A simdgroup's own queries, in base 2, in the basis of the keys.
template <typename Strides>
void stage_rows(DEVICE const T* queries, Strides strides, const THREAD Pages& pages,
                       Block block, const THREAD Place& place, bool rotated, SHARED T* staged) {
  float scale = float_of_bits(pages.parameter(SCALE));
  lanes_meet();
  for (uint r = 0; r < SIMDGROUP_ROWS; r++) {
    QueryRow row = query_row(pages, block, block.first_row + place.simdgroup * SIMDGROUP_ROWS + r);
    ulong head = place.y * pages.parameter(GQA_GROUP_SIZE) + row.head;
    DEVICE const T* query = queries + place.z * ulong(strides[0]) + head * ulong(strides[1]);
    float x[numbers_of_lane(K_DIM)];
    for (uint i = 0; i < numbers_of_lane(K_DIM); i++) {
      uint at = i * LANES + place.lane;
      bool is_there = row.is_there && at < K_DIM;
      ulong number = row.step * ulong(strides[2]) + at * ulong(strides[3]);
      x[i] = is_there ? float(query[number]) * scale : 0.0f;
    }
#ifdef HAS_CODES
    if (rotated) rotate<K_DIM>(x, place.lane);
#endif
    for (uint i = 0; i < numbers_of_lane(K_DIM); i++) {
      uint at = i * LANES + place.lane;
      if (at < K_DIM) staged[r * (K_DIM + PAD) + at] = T(x[i]);
    }
  }
  lanes_meet();
}

// Tokens of a tile: in a page from `first` on, or of the step; those outside [begin, end) are not
// read, and zeros stand for them.
struct Tile {
  bool is_new;
  uint first, position, begin, end;
};

template <uint DIM>
void read_any(Slots slots, uint token, uint at, THREAD float* x) {
#ifdef HAS_FLOATS
  if (slots.format == FLOATS) read_some<FLOATS, DIM, 8>(slots, token, at, x);
#endif
#ifdef HAS_Q8
  if (slots.format == Q8) read_some<Q8, DIM, 8>(slots, token, at, x);
#endif
#ifdef HAS_Q4
  if (slots.format == Q4) read_some<Q4, DIM, 8>(slots, token, at, x);
#endif
}

// Keys or values of a tile, by all threads of the threadgroup.
#ifdef HAS_NEW_TOKENS
template <uint DIM, typename Strides>
void load_tile(Tile tile, Slots slots, DEVICE const T* step, Strides strides,
               const THREAD Place& place, SHARED T* to) {
#else
template <uint DIM>
void load_tile(Tile tile, Slots slots, const THREAD Place& place, SHARED T* to) {
#endif
  threads_meet();
  for (uint i = place.index; i < TILE_TOKENS * (DIM / 8); i += PREFILL_THREADS) {
    uint token = i / (DIM / 8), at = i % (DIM / 8) * 8, position = tile.position + token;
    float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    bool is_there = position >= tile.begin && position < tile.end;
    if (is_there && !tile.is_new) read_any<DIM>(slots, tile.first + token, at, x);
#ifdef HAS_NEW_TOKENS
    if (is_there && tile.is_new) {
      ulong first = place.z * ulong(strides[0]) + place.y * ulong(strides[1]) +
                    (tile.first + token) * ulong(strides[2]);
      for (uint k = 0; k < 8; k++) x[k] = float(step[first + (at + k) * ulong(strides[3])]);
    }
#endif
    for (uint k = 0; k < 8; k++) to[token * STRIDE + at + k] = T(x[k]);
  }
  threads_meet();
}
