// Plans the work of a threadgroup of prefill, for matrices of any size.
//
// It takes query rows of one KV head, so that keys and values that it has read serve all of them. Row r
// is query r / gqa_group_size of the step, head r % gqa_group_size of the KV head's. A simdgroup takes
// some of the rows. Keys of 16 or 32 tokens, then their values, are turned into the model's dtype in
// threadgroup memory; such a tile lies in one page.
//
// Its rows are of one sequence, or IN_GROUPS of several sequences that share pages, one sequence after
// the other: then it reads these pages only.

CONSTANT uint BLOCK_ROWS = THREADS / LANES / SHARERS * SIMDGROUP_ROWS;

// Fields of a group: its pages [first, end) as places in the tables, its sequences, and the places of
// their results. -1 where there is none.
CONSTANT uint SEQUENCES = 16;
CONSTANT uint GROUP_FIELDS = 2 + 2 * SEQUENCES;

// The query rows of a threadgroup, from `first` on.
struct Rows {
#ifdef IN_GROUPS
  DEVICE const int* group;
#else
  uint sequence;
#endif
  uint first;
};

// A query row, and the positions [begin, end) that it sees. `place` is that of its results among those
// of all sequences, or of all groups.
struct QueryRow {
  uint sequence, place, step, head;
  bool has_place;
  bool is_there;  // not padding
  uint begin, end;
};

#ifdef IN_GROUPS
// The place of a row's sequence in its group.
uint sequence_at(const THREAD Pages& pages, Rows rows, uint number) {
  return (rows.first + number) / (pages.parameter(STEPS) * pages.parameter(GQA_GROUP_SIZE));
}
#endif

QueryRow query_row(const THREAD Pages& pages, Rows rows, uint number) {
  uint steps = pages.parameter(STEPS), gqa_group_size = pages.parameter(GQA_GROUP_SIZE);
#ifdef IN_GROUPS
  uint at = sequence_at(pages, rows, number);
  number += rows.first;
  int sequence = at < SEQUENCES ? rows.group[2 + at] : -1;
  int place = at < SEQUENCES ? rows.group[2 + SEQUENCES + at] : -1;
  number %= steps * gqa_group_size;
  QueryRow row = {uint(sequence), uint(place), 0, 0, place >= 0, sequence >= 0, 0, 0};
#else
  number += rows.first;
  QueryRow row = {rows.sequence, rows.sequence, 0, 0, number / gqa_group_size < steps, true, 0, 0};
#endif
  row.step = number / gqa_group_size, row.head = number % gqa_group_size;
  if (!row.is_there) return row;
  DEVICE const int* fields = pages.row(row.sequence);
  Own own = own_tokens(fields, steps);
  row.is_there = row.step >= own.begin && row.step < own.end;
  if (!row.is_there) return row;
  uint position = own.position + row.step - own.begin;
  row.begin = first_seen(fields, position, pages.parameter(WINDOW));
  row.end = pages.parameter(CAUSAL) ? position + 1 : uint(fields[ROW_LENGTH]);
  return row;
}

// The positions that rows see together; none if all are padding.
struct Block {
  uint begin, end;
};

// Of the rows of one sequence, a block of them.
Block block_of(const THREAD Pages& pages, DEVICE const int* row, Own own, uint first_row) {
  uint gqa_group_size = pages.parameter(GQA_GROUP_SIZE);
  uint first = first_row / gqa_group_size, last = (first_row + BLOCK_ROWS - 1) / gqa_group_size + 1;
  first = larger(first, own.begin);
  last = smaller(last, own.end);
  if (first >= last) return {0, 0};
  uint position = own.position + first - own.begin;
  return {first_seen(row, position, pages.parameter(WINDOW)),
          pages.parameter(CAUSAL) ? position + last - first : uint(row[ROW_LENGTH])};
}

#ifdef IN_GROUPS
// Of the sequences of a group from the first one of these rows on, in its pages.
Block block_of_group(const THREAD Pages& pages, Rows rows) {
  uint first = uint(rows.group[0]) * PAGE_SIZE, last = uint(rows.group[1]) * PAGE_SIZE;
  Block block = {last, first};
  for (uint at = sequence_at(pages, rows, 0); at < SEQUENCES && rows.group[2 + at] >= 0; at++) {
    DEVICE const int* row = pages.row(uint(rows.group[2 + at]));
    Own own = own_tokens(row, pages.parameter(STEPS));
    if (own.begin >= own.end) continue;
    block.begin = smaller(block.begin, first_seen(row, own.position, pages.parameter(WINDOW)));
    block.end = larger(block.end, uint(row[ROW_LENGTH]));
  }
  return {larger(block.begin, first), smaller(block.end, last)};
}
#endif

// A simdgroup's own queries, in base 2, in the basis of the keys.
template <typename Strides>
void stage_rows(DEVICE const T* queries, Strides strides, const THREAD Pages& pages, Rows rows,
                const THREAD Place& place, bool rotated, SHARED T* staged) {
  float scale = float_of_bits(pages.parameter(SCALE));
  lanes_meet();
  for (uint r = 0; r < SIMDGROUP_ROWS; r++) {
    QueryRow row = query_row(pages, rows, place.simdgroup * SIMDGROUP_ROWS + r);
    ulong head = place.y * pages.parameter(GQA_GROUP_SIZE) + row.head;
    float x[numbers_of_lane(K_DIM)];
    for (uint i = 0; i < numbers_of_lane(K_DIM); i++) {
      uint at = i * LANES + place.lane;
      bool is_there = row.is_there && at < K_DIM;
      ulong number = row.sequence * ulong(strides[0]) + head * ulong(strides[1]) +
                     row.step * ulong(strides[2]) + at * ulong(strides[3]);
      x[i] = is_there ? float(queries[number]) * scale : 0.0f;
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
#ifdef HAS_Q5
  if (slots.format == Q5) read_some<Q5, DIM, 8>(slots, token, at, x);
  if (slots.centre) {
    uint words[4];
    load<16>(slots.centre + at, words);
    for (uint i = 0; i < 8; i++) x[i] += float_of_half(ushort(words[i / 2] >> i % 2 * 16));
  }
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
  for (uint i = place.index; i < TILE_TOKENS * (DIM / 8); i += THREADS) {
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
