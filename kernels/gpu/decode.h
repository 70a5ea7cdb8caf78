// Attention of one query a row: reading keys and values is what takes the time.
//
// A simdgroup takes a part of a row's context, for one KV head and up to 8 of its query heads, and
// reads each key and value once for all of them, 32 tokens at a time:
//   1. Two lanes take two tokens: each holds half of the queries' products with both. Eight numbers
//      of a key are read at once, and neighbouring lanes read 32 bytes that lie side by side.
//   2. Each lane has one token's logits, and turns them into weights, which go to memory that the
//      simdgroup shares.
//   3. A lane takes some numbers of the values of all 32 tokens. It reads 2 or 4 at once, and the
//      whole simdgroup the row of one token.
// Softmax is done while reading, in base 2. What is left of a part - maximum, sum of weights,
// weighted values - goes to memory, and the merge kernel joins the parts.
//
// Values that are rotated and values that are not can only be added at the end: where a layer has
// both, one part reads the pages of the one kind, another part those of the other.

namespace paged_kv {

CONSTANT uint TILE = 32;

// Products of half of each query with two tokens' keys: sums[r] with token lane / 2, and
// sums[ROWS + r] with the one 16 behind it.
template <typename T, uint FORMAT, uint DIM, uint ROWS>
inline void multiply_keys(Rows keys, uint first, uint lane, SHARED const float* queries,
                          THREAD float* sums) {
  constexpr uint WORDS = row_words(FORMAT, DIM);
  uint token = first + lane / 2;
  DEVICE const ushort* row = keys.numbers + token * WORDS;
  DEVICE const ushort* scales = keys.scales + token * (DIM / GROUP);
  for (uint i = 0; i < 2 * ROWS; i++) sums[i] = 0.0f;
  for (uint octet = lane % 2; octet < DIM / 8; octet += 2) {
    float a[8], b[8];
    read_octet<T, FORMAT>(row, scales, octet, a);
    read_octet<T, FORMAT>(row + 16 * WORDS, scales + 16 * (DIM / GROUP), octet, b);
    UNROLL
    for (uint r = 0; r < ROWS; r++) {
      SHARED const float4* query = (SHARED const float4*)(queries + r * DIM + octet * 8);
      float4 low = query[0], high = query[1];
      const float q[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      UNROLL
      for (uint i = 0; i < 8; i++) {
        sums[r] = multiply_add(a[i], q[i], sums[r]);
        sums[ROWS + r] = multiply_add(b[i], q[i], sums[ROWS + r]);
      }
    }
  }
}

// Numbers of a value that a lane reads at once, and how often it does.
constexpr uint step_of(uint dim) { return dim % 128 ? 2 : 4; }
constexpr uint steps_of(uint dim) { return (dim + LANES * step_of(dim) - 1) / (LANES * step_of(dim)); }

// All that a lane has of a value.
constexpr uint numbers_of_value(uint dim) { return steps_of(dim) * step_of(dim); }

// Adds the weighted values of tokens [begin, end) of a page; weights are those from `first` on.
template <typename T, uint FORMAT, uint DIM, uint ROWS>
inline void add_values(Rows values, uint first, uint begin, uint end, uint lane,
                       SHARED const float* weights, THREAD float* sums) {
  constexpr uint WORDS = row_words(FORMAT, DIM), STEP = step_of(DIM), STEPS = steps_of(DIM);
  for (uint token = begin; token < end; token++) {
    DEVICE const ushort* row = values.numbers + token * WORDS;
    DEVICE const ushort* scales = values.scales + token * (DIM / GROUP);
    SHARED const float* weight = weights + (token - first) * ROWS;
    UNROLL
    for (uint step = 0; step < STEPS; step++) {
      uint at = (step * LANES + lane) * STEP;
      if (at >= DIM) continue;
      float x[STEP];
      read_some<T, FORMAT, STEP>(row, scales, at, x);
      UNROLL
      for (uint r = 0; r < ROWS; r++) {
        THREAD float* sum = sums + (r * STEPS + step) * STEP;
        for (uint i = 0; i < STEP; i++) sum[i] = multiply_add(weight[r], x[i], sum[i]);
      }
    }
  }
}

// Queries in base 2, and behind them the same rotated, if keys may be.
template <typename T, uint DIM, uint ROWS, uint BASES, typename Strides>
inline void stage_queries(DEVICE const T* queries, Strides strides, const THREAD Pages& pages,
                          uint number, uint head, uint first_row, uint simdgroup,
                          uint simdgroups, uint lane, SHARED float* staged) {
  uint ratio = pages.parameter(RATIO);
  float scale = float_of_bits(pages.parameter(SCALE));
  for (uint r = simdgroup; r < ROWS; r += simdgroups) {
    float x[numbers_of_lane(DIM)];
    uint q_head = head * ratio + first_row + r;
    DEVICE const T* query = queries + number * ulong(strides[0]) + q_head * ulong(strides[1]);
    for (uint i = 0; i < numbers_of_lane(DIM); i++) {
      uint at = i * LANES + lane;
      bool is_there = at < DIM && first_row + r < ratio;
      x[i] = is_there ? float(query[at * ulong(strides[3])]) * scale : 0.0f;
      if (at < DIM) staged[r * DIM + at] = x[i];
    }
    if (BASES == 1) continue;
    rotate<DIM>(x, lane);
    for (uint i = 0; i < numbers_of_lane(DIM); i++)
      staged[(ROWS + r) * DIM + i * LANES + lane] = x[i];
  }
}

// The tokens that a row's query sees: [begin, end).
struct Seen {
  uint begin, end;
};

inline Seen seen_tokens(DEVICE const int* row, uint window) {
  uint length = row[1] ? 0 : uint(row[0]);  // where the step is padding it sees nothing
  return {window && length > window ? length - window : 0, length};
}

template <typename T, uint K_DIM, uint V_DIM, uint ROWS, uint FORMATS>
struct Part {
  float maximum[ROWS], sum[ROWS], values[ROWS * numbers_of_value(V_DIM)];

  inline void clear() THREAD {
    for (uint r = 0; r < ROWS; r++) maximum[r] = LOWEST, sum[r] = 0.0f;
    for (uint i = 0; i < ROWS * numbers_of_value(V_DIM); i++) values[i] = 0.0f;
  }

  inline void multiply(Rows keys, uint first, uint lane, SHARED const float* queries,
                       THREAD float* sums) THREAD {
    if (FORMATS & mask_of(FLOATS) && keys.format == FLOATS)
      multiply_keys<T, FLOATS, K_DIM, ROWS>(keys, first, lane, queries, sums);
    if (FORMATS & mask_of(Q8) && keys.format == Q8)
      multiply_keys<T, Q8, K_DIM, ROWS>(keys, first, lane, queries, sums);
    if (FORMATS & mask_of(Q4) && keys.format == Q4)
      multiply_keys<T, Q4, K_DIM, ROWS>(keys, first, lane, queries, sums);
  }

  inline void add(Rows rows, uint first, uint begin, uint end, uint lane,
                  SHARED const float* weights) THREAD {
    if (FORMATS & mask_of(FLOATS) && rows.format == FLOATS)
      add_values<T, FLOATS, V_DIM, ROWS>(rows, first, begin, end, lane, weights, values);
    if (FORMATS & mask_of(Q8) && rows.format == Q8)
      add_values<T, Q8, V_DIM, ROWS>(rows, first, begin, end, lane, weights, values);
    if (FORMATS & mask_of(Q4) && rows.format == Q4)
      add_values<T, Q4, V_DIM, ROWS>(rows, first, begin, end, lane, weights, values);
  }

  // Turns products into weights, and what was summed so far into the same measure.
  inline void weigh(THREAD float* sums, bool sees, uint lane, SHARED float* weights) THREAD {
    uint token = lane / 2 + lane % 2 * 16;
    UNROLL
    for (uint r = 0; r < ROWS; r++) {
      float kept = lane & 1 ? sums[ROWS + r] : sums[r];
      float logit = kept + from_lane_xor(lane & 1 ? sums[r] : sums[ROWS + r], 1);
      if (!sees) logit = NEVER;
      float above = larger(maximum[r], largest_of_lanes(logit));
      float factor = power_of_2(maximum[r] - above), weight = power_of_2(logit - above);
      maximum[r] = above;
      sum[r] = multiply_add(sum[r], factor, weight);
      constexpr uint EACH = numbers_of_value(V_DIM);
      for (uint i = 0; i < EACH; i++) values[r * EACH + i] *= factor;
      weights[token * ROWS + r] = weight;
    }
  }

  inline void read_tile(Rows keys, Rows rows, Seen seen, uint position, uint lane,
                        SHARED const float* queries, SHARED float* weights) THREAD {
    uint first = position % PAGE_SIZE, token = position + lane / 2 + lane % 2 * 16;
    float sums[2 * ROWS];
    multiply(keys, first, lane, queries, sums);
    weigh(sums, token >= seen.begin && token < seen.end, lane, weights);
    lanes_meet();
    // What lies outside may be anything, also NaN, and must not be multiplied by zero.
    uint begin = seen.begin > position ? seen.begin - position : 0;
    uint end = seen.end - position < TILE ? seen.end - position : TILE;
    add(rows, first, first + begin, first + end, lane, weights);
    lanes_meet();
  }

  inline void store(uint r, uint lane, DEVICE float* partial, DEVICE float* measure) THREAD {
    constexpr uint STEP = step_of(V_DIM), STEPS = steps_of(V_DIM);
    float total = sum_of_lanes(sum[r]);
    if (lane == 0) measure[0] = maximum[r], measure[1] = total;
    for (uint step = 0; step < STEPS; step++) {
      uint at = (step * LANES + lane) * STEP;
      for (uint i = 0; i < STEP && at < V_DIM; i++)
        partial[at + i] = values[(r * STEPS + step) * STEP + i];
    }
  }
};

template <typename T, uint K_DIM, uint V_DIM, uint ROWS, uint BLOCKS, uint PARTS, uint FORMATS,
          typename Strides>
inline void decode(DEVICE const T* queries, Strides strides, const THREAD Pages& pages,
                   const THREAD Place& place, SHARED float* staged, SHARED float* all_weights,
                   DEVICE float* partials, DEVICE float* measures) {
  constexpr uint BASES = FORMATS == 1 ? 1 : 2, STAGED = BASES * ROWS * K_DIM;
  uint heads = pages.parameter(KV_HEADS), ratio = pages.parameter(RATIO);
  uint bases = pages.parameter(BASES_OF_VALUES), number = place.z / bases;
  uint head = place.x % heads, block = place.simdgroup % BLOCKS;
  uint first_row = (place.x / heads * BLOCKS + block) * ROWS;
  SHARED float* own = staged + block * STAGED;
  stage_queries<T, K_DIM, ROWS, BASES>(queries, strides, pages, number, head, first_row,
                                       place.simdgroup / BLOCKS, PARTS, place.lane, own);
  threads_meet();
  uint splits = pages.parameter(SPLITS), tiles = pages.parameter(SPLIT_TILES);
  uint split = place.y * PARTS + place.simdgroup / BLOCKS;
  if (split >= splits) return;
  DEVICE const int* row = pages.row(number);
  Seen seen = seen_tokens(row, pages.parameter(WINDOW));
  bool rotated = pages.parameter(FIRST_BASIS) + place.z % bases;
  Part<T, K_DIM, V_DIM, ROWS, FORMATS> part;
  part.clear();
  uint first = seen.begin / TILE + split * tiles;
  for (uint tile = first; tile < first + tiles && tile * TILE < seen.end; tile++) {
    uint position = tile * TILE, entry = uint(row[ROW_FIELDS + position / PAGE_SIZE]);
    Rows values = pages.rows(entry, head, V_DIM, true);
    if (values.rotated != rotated) continue;
    Rows keys = pages.rows(entry, head, K_DIM, false);
    part.read_tile(keys, values, seen, position, place.lane,
                   own + (BASES == 2 && keys.rotated ? ROWS * K_DIM : 0),
                   all_weights + place.simdgroup * TILE * ROWS);
  }
  for (uint r = 0; r < ROWS; r++) {
    if (first_row + r >= ratio) break;
    uint q_head = number * heads * ratio + head * ratio + first_row + r;
    ulong slot = (q_head * bases + place.z % bases) * ulong(splits) + split;
    part.store(r, place.lane, partials + slot * V_DIM, measures + slot * 2);
  }
}

}  // namespace paged_kv
