// Attention of one query token per sequence (a row of the tables): bound by reading keys and values.
//
// A threadgroup takes a part of a sequence's context, for one KV head and some of its query heads. BLOCKS
// simdgroups read the same keys for up to 8 query heads each, and PARTS share the part's tiles.
// Each key and value is read once for all query heads of a simdgroup, 32 tokens at a time:
//   1. Two lanes take two tokens: each holds half of the queries' products with both. It reads 16 bytes
//      of a key at once, and neighbouring lanes read 32 bytes that lie side by side.
//   2. Each lane has one token's logits, and turns them into weights, which go to memory that the
//      simdgroup shares.
//   3. A lane takes some numbers of the values of all 32 tokens. It reads 2 or 4 at once, and the
//      whole simdgroup one slot: those of AHEAD tokens, before it uses the first.
// An online softmax runs while reading, in base 2. Then the simdgroups merge their results. If the
// context is one part, that is the output (WHOLE). Otherwise the maximum, sum of weights and weighted
// values of each part go to memory (PARTIAL, the split-KV partials), and the merge kernel joins them.
//
// With CHOSEN it reads some runs of tokens of each sequence, which each KV head has chosen. Tiles then count the
// tokens of these runs.
//
// Rotated and plain values cannot be added. If a layer has both, a simdgroup turns its sums where a page of the other
// kind follows, and at the end to the plain basis.
//
// With a STEP the kernel also gets the keys and values of the sequences' last tokens, and writes them to
// their pages, which hold floats. A launch must not read what it writes: threadgroups run in no order, and a compiler may
// read a kernel's inputs through a cache that does not see writes. So no thread reads the slot of such
// a token. The threadgroups that attend to it, those of the first part, each take it from the inputs,
// and one of them writes it.

CONSTANT uint TILE = 32;

// Numbers of a value that a lane reads at once, its number of reads, and all its numbers.
CONSTANT uint V_STEP = V_DIM % 128 ? 2 : 4;
CONSTANT uint V_STEPS = (V_DIM + LANES * V_STEP - 1) / (LANES * V_STEP);
CONSTANT uint V_NUMBERS = V_STEPS * V_STEP;

// Floats of a simdgroup in threadgroup memory: the step's value, weights of a tile, and at the end the
// values of one query head.
CONSTANT uint OWN = TILE * ROWS > V_DIM ? TILE * ROWS : V_DIM;

// Floats of queries in threadgroup memory for each query head: in both bases, where keys may be in
// both.
#ifdef HAS_CODES
CONSTANT uint STAGED = 2 * K_DIM;
#else
CONSTANT uint STAGED = K_DIM;
#endif

// Numbers i to i + 3 of 16 bytes of a slot, codes without their scale.
template <uint FORMAT>
void unpack_four(const THREAD uint* words, uint fifths, uint i, THREAD float* x) {
  if (FORMAT != Q5) return unpack<FORMAT, 4>(words + i * FORMAT / 32, x);
  uint word = with_fifths(words[i / 4 % 4] >> i / 16 * 4, fifths, i);
  unpack<Q5, 4>(&word, x);
}

// Products of half of each query with two tokens' keys: sums[r] with the near one, sums[ROWS + r] with
// the far one. Every second 16 bytes of a key are one lane's: of 32 codes of 5 bits, the lower bits.
template <uint FORMAT>
void multiply_keys(Slots keys, uint near, uint far, uint lane, SHARED const float* queries,
                          THREAD float* sums) {
  constexpr uint COUNT = 128 / slot_words(FORMAT, 16);
  for (uint i = 0; i < 2 * ROWS; i++) sums[i] = 0.0f;
#ifndef HAS_CODES
  UNROLL_2
#endif
  for (uint at = lane % 2 * COUNT; at < K_DIM; at += 2 * COUNT) {
    uint words[8];
    load<16>(keys.numbers + near * slot_words(FORMAT, K_DIM) + slot_words(FORMAT, at), words);
    load<16>(keys.numbers + far * slot_words(FORMAT, K_DIM) + slot_words(FORMAT, at), words + 4);
    uint fifths[2] = {0, 0};
#ifdef HAS_Q5
    if (FORMAT == Q5) fifths[0] = fifths_at<K_DIM>(keys, near, at), fifths[1] = fifths_at<K_DIM>(keys, far, at);
#endif
    float scales[2] = {scale_at<FORMAT, K_DIM>(keys, near, at), scale_at<FORMAT, K_DIM>(keys, far, at)};
    float dots[2 * ROWS];
    for (uint i = 0; i < 2 * ROWS; i++) dots[i] = FORMAT == FLOATS ? sums[i] : 0.0f;
    UNROLL
    for (uint i = 0; i < COUNT; i += 4) {
      float x[8];
      unpack_four<FORMAT>(words, fifths[0], i, x);
      unpack_four<FORMAT>(words + 4, fifths[1], i, x + 4);
      UNROLL
      for (uint r = 0; r < ROWS; r++) {
        float4 four = *(SHARED const float4*)(queries + r * K_DIM + at + i);
        float q[4] = {four.x, four.y, four.z, four.w};
        for (uint j = 0; j < 8; j++)
          dots[j / 4 * ROWS + r] = multiply_add(x[j], q[j % 4], dots[j / 4 * ROWS + r]);
      }
    }
    for (uint i = 0; i < 2 * ROWS; i++)
      sums[i] = FORMAT == FLOATS ? dots[i] : multiply_add(dots[i], scales[i / ROWS], sums[i]);
  }
}

#ifdef HAS_Q5
// Adds the queries' products with the centre of the tokens' page, a half in each of two lanes that share
// a token. They are not kept for the page's next tile: of 8 PARTS each has one tile of a page.
void multiply_centre(DEVICE const ushort* centre, uint lane, SHARED const float* queries,
                     THREAD float* sums) {
  UNROLL
  for (uint r = 0; r < ROWS; r++) {
    float sum = 0.0f;
    for (uint at = lane; at < K_DIM; at += LANES)
      sum = multiply_add(float_of_half(centre[at]), queries[r * K_DIM + at], sum);
    sum = sum_of_lanes(sum) * 0.5f;
    sums[r] += sum, sums[ROWS + r] += sum;
  }
}
#endif

// Adds the weighted values of tokens [begin, end) of a page, which lie in one tile. The tile's others have weight 0, but
// their slots may hold anything, even NaN: so one of these is read in their place.
template <uint FORMAT>
void add_values(Slots values, uint begin, uint end, uint lane, SHARED const float* weights,
                       THREAD float* sums) {
  for (uint first = begin / AHEAD * AHEAD; first < end && begin < end; first += AHEAD) {
    UNROLL
    for (uint step = 0; step < V_STEPS; step++) {
      uint at = (step * LANES + lane) * V_STEP;
      if (at >= V_DIM) continue;
      uint words[AHEAD * 2];
      float scales[AHEAD];
      UNROLL
      for (uint i = 0; i < AHEAD; i++) {
        uint token = smaller(larger(first + i, begin), end - 1);
        load_some<FORMAT, V_DIM, V_STEP>(values, token, at, words + i * 2);
        scales[i] = scale_at<FORMAT, V_DIM>(values, token, at);
      }
      UNROLL
      for (uint i = 0; i < AHEAD; i++) {
        float x[V_STEP];
        unpack<FORMAT, V_STEP>(words + i * 2, x);
        UNROLL
        for (uint r = 0; r < ROWS; r++) {
          THREAD float* sum = sums + r * V_NUMBERS + step * V_STEP;
          float weight = weights[(first + i) % TILE * ROWS + r] * scales[i];
          for (uint j = 0; j < V_STEP; j++) sum[j] = multiply_add(weight, x[j], sum[j]);
        }
      }
    }
  }
}

// Queries in base 2, followed by the rotated queries if keys may be rotated.
template <typename Strides>
void stage_queries(DEVICE const T* queries, Strides strides, const THREAD Pages& pages,
                          uint number, uint first_head, uint count, uint part, uint lane,
                          SHARED float* staged) {
  float scale = float_of_bits(pages.parameter(SCALE));
  for (uint r = part; r < ROWS; r += PARTS) {
    float x[numbers_of_lane(K_DIM)];
    DEVICE const T* query = queries + number * ulong(strides[0]) + (first_head + r) * ulong(strides[1]);
    for (uint i = 0; i < numbers_of_lane(K_DIM); i++) {
      uint at = i * LANES + lane;
      x[i] = at < K_DIM && r < count ? float(query[at * ulong(strides[3])]) * scale : 0.0f;
      if (at < K_DIM) staged[r * K_DIM + at] = x[i];
    }
#ifdef HAS_CODES
    rotate<K_DIM>(x, lane);
    for (uint i = 0; i < numbers_of_lane(K_DIM); i++)
      if (i * LANES + lane < K_DIM) staged[(ROWS + r) * K_DIM + i * LANES + lane] = x[i];
#endif
  }
}

// Queries in the basis of keys.
SHARED const float* in_basis(SHARED const float* staged, bool rotated) {
#ifdef HAS_CODES
  return staged + (rotated ? ROWS * K_DIM : 0);
#else
  return staged;
#endif
}

// The tokens that a sequence's query sees, [begin, end), and the page and the place in it of the last one.
struct Seen {
  uint begin, end, entry, slot;
};

Seen seen_tokens(DEVICE const int* row, uint window) {
  uint length = row[1] ? 0 : uint(row[0]);  // a padding query sees nothing
  uint last = length ? length - 1 : 0;
  return {first_seen(row, last, window), length, uint(row[ROW_FIELDS + last / PAGE_SIZE]), last % PAGE_SIZE};
}

#ifdef CHOSEN
// How many tokens are read of a sequence that has more than may be read. Its last run may be partly empty.
uint chosen_tokens(uint length, uint most) {
  return most / RUN_TOKENS * RUN_TOKENS - (RUN_TOKENS - 1) + (length - 1) % RUN_TOKENS;
}

// The position of one of the tokens of the chosen runs.
uint chosen_position(DEVICE const int* runs, uint at) {
  return uint(runs[at / RUN_TOKENS]) * RUN_TOKENS + at % RUN_TOKENS;
}
#endif

// The running softmax of a simdgroup's tiles; the sum of weights is over the lane's tokens.
struct Part {
  float maximum[ROWS], sum[ROWS], values[ROWS * V_NUMBERS];
#ifdef HAS_SOFTCAP
  float softcap;
#endif

  void clear() THREAD {
    for (uint r = 0; r < ROWS; r++) maximum[r] = LOWEST, sum[r] = 0.0f;
    for (uint i = 0; i < ROWS * V_NUMBERS; i++) values[i] = 0.0f;
  }

  uint place_of(uint i, uint lane) const THREAD { return (i / V_STEP * LANES + lane) * V_STEP + i % V_STEP; }

  // Writes the values of a query head, rescaled to another maximum, to memory that the simdgroup shares.
  void give(uint r, float factor, uint lane, SHARED float* own) THREAD {
    for (uint i = 0; i < V_NUMBERS; i++)
      if (place_of(i, lane) < V_DIM) own[place_of(i, lane)] = values[r * V_NUMBERS + i] * factor;
  }

  // Replaces the values of a query head by some that are spread over the lanes.
  void take(uint r, const THREAD float* x, uint lane, SHARED float* own) THREAD {
    for (uint i = 0; i < numbers_of_lane(V_DIM); i++)
      if (i * LANES + lane < V_DIM) own[i * LANES + lane] = x[i];
    lanes_meet();
    for (uint i = 0; i < V_NUMBERS; i++)
      if (place_of(i, lane) < V_DIM) values[r * V_NUMBERS + i] = own[place_of(i, lane)];
    lanes_meet();
  }

#ifdef HAS_CODES
  // Turns the values to the other basis.
  void turn(uint lane, SHARED float* own) THREAD {
    UNROLL
    for (uint r = 0; r < ROWS; r++) {
      give(r, 1.0f, lane, own);
      lanes_meet();
      float x[numbers_of_lane(V_DIM)];
      for (uint i = 0; i < numbers_of_lane(V_DIM); i++) x[i] = own[i * LANES + lane];
      rotate<V_DIM>(x, lane);
      take(r, x, lane, own);
    }
  }
#endif

#ifdef STEP
  // Begins with one token of weight 1 instead, whose key and value are spread over the lanes.
  void begin_with(const THREAD float* key, const THREAD float* value, uint lane,
                         SHARED const float* queries, SHARED float* own) THREAD {
    for (uint r = 0; r < ROWS; r++) {
      float logit = 0.0f;
      for (uint i = 0; i < numbers_of_lane(K_DIM); i++)
        if (i * LANES + lane < K_DIM)
          logit = multiply_add(key[i], queries[r * K_DIM + i * LANES + lane], logit);
      maximum[r] = sum_of_lanes(logit);
#ifdef HAS_SOFTCAP
      maximum[r] = capped(maximum[r], softcap);
#endif
      sum[r] = lane ? 0.0f : 1.0f;
    }
    for (uint r = 0; r < ROWS; r++) take(r, value, lane, own);
  }
#endif

  void multiply(Slots keys, uint near, uint far, uint lane, SHARED const float* queries,
                       THREAD float* sums) THREAD {
#ifdef HAS_FLOATS
    if (keys.format == FLOATS) multiply_keys<FLOATS>(keys, near, far, lane, queries, sums);
#endif
#ifdef HAS_Q8
    if (keys.format == Q8) multiply_keys<Q8>(keys, near, far, lane, queries, sums);
#endif
#ifdef HAS_Q5
    if (keys.format == Q5) multiply_keys<Q5>(keys, near, far, lane, queries, sums);
#endif
  }

  void add(Slots slots, uint begin, uint end, uint lane, SHARED const float* weights) THREAD {
#ifdef HAS_FLOATS
    if (slots.format == FLOATS) add_values<FLOATS>(slots, begin, end, lane, weights, values);
#endif
#ifdef HAS_Q8
    if (slots.format == Q8) add_values<Q8>(slots, begin, end, lane, weights, values);
#endif
#ifdef HAS_Q4
    if (slots.format == Q4) add_values<Q4>(slots, begin, end, lane, weights, values);
#endif
  }

  // Turns products into weights, and rescales the earlier sums to the new maximum.
  void weigh(THREAD float* sums, bool sees, uint lane, SHARED float* weights) THREAD {
    uint token = lane / 2 + lane % 2 * 16;
    UNROLL
    for (uint r = 0; r < ROWS; r++) {
      float kept = lane & 1 ? sums[ROWS + r] : sums[r];
      float logit = kept + from_lane_xor(lane & 1 ? sums[r] : sums[ROWS + r], 1);
#ifdef HAS_SOFTCAP
      logit = capped(logit, softcap);
#endif
      if (!sees) logit = NEVER;
      float above = larger(maximum[r], largest_of_lanes(logit));
      float factor = power_of_2(maximum[r] - above), weight = power_of_2(logit - above);
      maximum[r] = above;
      sum[r] = multiply_add(sum[r], factor, weight);
      for (uint i = 0; i < V_NUMBERS; i++) values[r * V_NUMBERS + i] *= factor;
      weights[token * ROWS + r] = weight;
    }
  }

  void read_tile(Slots keys, Slots slots, Seen seen, bool is_last, uint position, uint lane,
                        SHARED const float* queries, SHARED float* weights) THREAD {
    uint first = position % PAGE_SIZE, token = position + lane / 2 + lane % 2 * 16;
    uint near = first + lane / 2, far = near + 16;
#ifdef STEP
    // Replaces the slot that is being written by another one of the tile; no query sees it there.
    if (is_last) near ^= near == seen.slot, far ^= far == seen.slot;
#endif
    float sums[2 * ROWS];
    multiply(keys, near, far, lane, queries, sums);
#ifdef HAS_Q5
    if (keys.centre) multiply_centre(keys.centre, lane, queries, sums);
#endif
    weigh(sums, token >= seen.begin && token < seen.end, lane, weights);
    lanes_meet();
    uint begin = larger(seen.begin, position) - position, end = smaller(seen.end - position, TILE);
    add(slots, first + begin, first + end, lane, weights);
    lanes_meet();
  }

  // For each query head the maximum and the sum of weights.
  void measure(uint lane, SHARED float* measures) THREAD {
    for (uint r = 0; r < ROWS; r++) {
      float total = sum_of_lanes(sum[r]);
      if (lane == 0) measures[r * 2] = maximum[r], measures[r * 2 + 1] = total;
    }
  }
};

// The largest of the simdgroups of a block.
float joined_maximum(SHARED const float* measures) {
  float maximum = LOWEST;
  for (uint part = 0; part < PARTS; part++)
    maximum = larger(maximum, measures[part * BLOCKS * ROWS * 2]);
  return maximum;
}

// The sum of the weights of a block's simdgroups, and of their values, all scaled to one maximum.
float join(SHARED const float* measures, SHARED const float* given, float maximum, uint lane,
           THREAD float* values) {
  float sum = 0.0f;
  for (uint i = 0; i < numbers_of_lane(V_DIM); i++) values[i] = 0.0f;
  for (uint part = 0; part < PARTS; part++) {
    SHARED const float* measure = measures + part * BLOCKS * ROWS * 2;
    sum = multiply_add(power_of_2(measure[0] - maximum), measure[1], sum);
    for (uint i = 0; i < numbers_of_lane(V_DIM); i++)
      if (i * LANES + lane < V_DIM) values[i] += given[part * BLOCKS * OWN + i * LANES + lane];
  }
  return sum;
}

#ifdef SINKS
template <typename Strides, typename Sinks>
#else
template <typename Strides>
#endif
void decode(DEVICE const T* queries, Strides strides,
#ifdef STEP
                   DEVICE const T* step_keys, Strides k_strides, DEVICE const T* step_values,
                   Strides v_strides,
#endif
#ifdef CHOSEN
                   DEVICE const int* runs,
#endif
#ifdef WHOLE
#ifdef SINKS
                   DEVICE const Sinks* sinks, Strides s_strides,
#endif
                   DEVICE T* output,
#else
                   DEVICE float* partials, DEVICE float* measures,
#endif
                   const THREAD Pages& pages, const THREAD Place& place, SHARED float* all_queries,
                   SHARED float* all_own, SHARED float* all_measures) {
  uint heads = pages.parameter(KV_HEADS), gqa_group_size = pages.parameter(GQA_GROUP_SIZE);
  uint number = place.z, lane = place.lane;
  uint head = place.x % heads, block = place.simdgroup % BLOCKS, part = place.simdgroup / BLOCKS;
  uint first_row = (place.x / heads * BLOCKS + block) * ROWS, first_head = head * gqa_group_size + first_row;
  SHARED float* staged = all_queries + block * ROWS * STAGED;
  stage_queries(queries, strides, pages, number, first_head, gqa_group_size - first_row, part, lane, staged);
  threads_meet();
  DEVICE const int* row = pages.row(number);
  Seen seen = seen_tokens(row, pages.parameter(WINDOW));
#ifdef CHOSEN
  // From here on `seen` and tiles count the tokens that are read.
  uint most = pages.parameter(TOKENS);
  bool chooses = seen.end > most;
  if (chooses) seen.end = chosen_tokens(seen.end, most);
  runs += (number * heads + head) * ulong(most / RUN_TOKENS);
#endif
  SHARED float* own = all_own + place.simdgroup * OWN;
  Part sums;
  sums.clear();
#ifdef HAS_SOFTCAP
  sums.softcap = float_of_bits(pages.parameter(SOFTCAP));
#endif
#ifdef STEP
  if (seen.end && place.y + part == 0) {
    float key[numbers_of_lane(K_DIM)], value[numbers_of_lane(V_DIM)];
    read_step<K_DIM>(step_keys, k_strides, number, head, 0, lane, key);
    read_step<V_DIM>(step_values, v_strides, number, head, 0, lane, value);
    if (first_row == 0) {
      write_slot<K_DIM>(pages.slots(seen.entry, head, K_DIM, false), seen.slot, lane, key);
      write_slot<V_DIM>(pages.slots(seen.entry, head, V_DIM, true), seen.slot, lane, value);
    }
    sums.begin_with(key, value, lane, in_basis(staged, false), own);
  }
  if (seen.end) seen.end--;
#endif
#ifdef HAS_CODES
  bool rotated = false;
#endif
  uint tiles = pages.parameter(SPLIT_TILES), first = seen.begin / TILE + place.y * tiles;
  for (uint tile = first + part; tile < first + tiles && tile * TILE < seen.end; tile += PARTS) {
#ifdef CHOSEN
    uint position = chooses ? chosen_position(runs, tile * TILE) : tile * TILE;
    uint entry = uint(row[ROW_FIELDS + position / PAGE_SIZE]);
    // As many tokens as follow in the tile are seen from there.
    Seen here = {0, position + seen.end - tile * TILE, seen.entry, seen.slot};
#else
    uint position = tile * TILE, entry = uint(row[ROW_FIELDS + position / PAGE_SIZE]);
    Seen here = seen;
#endif
    Slots values = pages.slots(entry, head, V_DIM, true);
#ifdef HAS_CODES
    if (values.is_rotated() != rotated) sums.turn(lane, own), rotated = !rotated;
#endif
    Slots keys = pages.slots(entry, head, K_DIM, false);
    sums.read_tile(keys, values, here, entry == seen.entry, position, lane,
                   in_basis(staged, keys.is_rotated()), own);
  }
#ifdef HAS_CODES
  if (rotated) sums.turn(lane, own);
#endif
  SHARED float* measures_here = all_measures + block * ROWS * 2;
  sums.measure(lane, measures_here + part * BLOCKS * ROWS * 2);
  threads_meet();
  UNROLL
  for (uint r = 0; r < ROWS; r++) {
    float maximum = joined_maximum(measures_here + r * 2);
    sums.give(r, power_of_2(sums.maximum[r] - maximum), lane, own);
    threads_meet();
    if (r % PARTS == part && first_row + r < gqa_group_size) {
      float x[numbers_of_lane(V_DIM)];
      float total = join(measures_here + r * 2, all_own + block * OWN, maximum, lane, x);
      ulong at = number * heads * gqa_group_size + first_head + r;
#ifdef WHOLE
#ifdef SINKS
      float sink = float(sinks[(first_head + r) * ulong(s_strides[0])]) * LOG2_E;
      float above = larger(maximum, sink), factor = power_of_2(maximum - above);
      total = multiply_add(total, factor, power_of_2(sink - above));
#else
      float factor = 1.0f;
#endif
      store_numbers<V_DIM>(x, total > 0.0f ? factor / total : 0.0f, lane, output + at * V_DIM);
#else
      at = at * pages.parameter(SPLITS) + place.y;
      if (lane == 0) measures[at * 2] = maximum, measures[at * 2 + 1] = total;
      store_numbers<V_DIM>(x, 1.0f, lane, partials + at * V_DIM);
#endif
    }
    threads_meet();
  }
}
