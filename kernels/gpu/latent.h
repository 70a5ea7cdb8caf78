// Latent attention of one query token per sequence (a row of the tables). All query heads share one key:
// a latent of K_DIM numbers, and a position key of V_DIM behind it. What is summed are the latents.
//
// A threadgroup takes a part of a sequence's context, for ROWS query heads of each of its simdgroups.
// Each simdgroup turns one token of a tile into floats, in the plain basis, in memory that all of them
// share. So a token is read and decoded once for all of these heads. Then each simdgroup multiplies
// the tile with its queries, of which a lane has some numbers. An online softmax runs in base 2. The
// merge kernel joins the parts.

CONSTANT uint TOKEN = K_DIM + V_DIM;  // numbers of a token
CONSTANT uint OF_LATENT = numbers_of_lane(K_DIM), OF_POSITION = numbers_of_lane(V_DIM);

template <uint DIM, typename To>
void decode_token(Slots slots, uint token, uint lane, SHARED To* to) {
  float x[numbers_of_lane(DIM)];
  read_slot<DIM>(slots, token, lane, x);
#ifdef HAS_CODES
  if (slots.is_rotated() && DIM % LANES == 0) rotate<DIM>(x, lane);
#endif
  for (uint i = 0; i < numbers_of_lane(DIM); i++)
    if (i * LANES + lane < DIM) to[i * LANES + lane] = To(x[i]);
}

// A query in device memory; zeros where there is none.
struct Query {
  DEVICE const T* numbers;
  ulong stride;
  bool is_there;

  T number(uint at) const THREAD { return is_there ? numbers[at * stride] : T(0.0f); }
};

template <typename Strides>
Query query_of(DEVICE const T* queries, Strides strides, uint sequence, uint head, bool is_there) {
  return {queries + sequence * ulong(strides[0]) + head * ulong(strides[1]), ulong(strides[3]), is_there};
}

// A lane's numbers of a query.
template <uint DIM>
void read_query(Query query, float scale, uint lane, THREAD float* x) {
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + lane;
    x[i] = at < DIM ? float(query.number(at)) * scale : 0.0f;
  }
}

// A lane's part of the product of a query and a key.
template <uint DIM>
float lane_product(const THREAD float* query, SHARED const float* key, uint lane, float sum) {
  for (uint i = 0; i < numbers_of_lane(DIM); i++)
    if (i * LANES + lane < DIM) sum = multiply_add(query[i], key[i * LANES + lane], sum);
  return sum;
}

// The running softmax of one query head.
struct LatentSum {
  float maximum, sum, values[OF_LATENT];

  void clear() THREAD {
    maximum = LOWEST, sum = 0.0f;
    for (uint i = 0; i < OF_LATENT; i++) values[i] = 0.0f;
  }

  // Adds tokens [begin, end) of a tile.
  void add(const THREAD float* query, const THREAD float* position_query, uint begin, uint end,
           uint lane, SHARED const float* tile) THREAD {
    float logits[SIMDGROUPS], above = maximum;
    UNROLL
    for (uint t = 0; t < SIMDGROUPS; t++) {
      logits[t] = NEVER;
      if (t < begin || t >= end) continue;
      SHARED const float* key = tile + t * TOKEN;
      float part = lane_product<K_DIM>(query, key, lane, 0.0f);
      logits[t] = sum_of_lanes(lane_product<V_DIM>(position_query, key + K_DIM, lane, part));
      above = larger(above, logits[t]);
    }
    float factor = power_of_2(maximum - above);
    maximum = above, sum *= factor;
    for (uint i = 0; i < OF_LATENT; i++) values[i] *= factor;
    UNROLL
    for (uint t = 0; t < SIMDGROUPS; t++) {
      // Memory of other tokens may hold anything, even NaN.
      if (t < begin || t >= end) continue;
      float weight = power_of_2(logits[t] - above);
      sum += weight;
      for (uint i = 0; i < OF_LATENT; i++)
        if (i * LANES + lane < K_DIM)
          values[i] = multiply_add(weight, tile[t * TOKEN + i * LANES + lane], values[i]);
    }
  }
};

template <typename Strides>
void attend_latent(DEVICE const T* queries, Strides strides, DEVICE const T* position_queries,
                   Strides p_strides, DEVICE float* partials, DEVICE float* measures,
                   const THREAD Pages& pages, const THREAD Place& place, SHARED float* tile) {
  uint heads = pages.parameter(GQA_GROUP_SIZE), number = place.z, lane = place.lane;
  uint first_head = (place.x * SIMDGROUPS + place.simdgroup) * ROWS;
  float scale = float_of_bits(pages.parameter(SCALE));
  float query[ROWS * OF_LATENT], position_query[ROWS * OF_POSITION];
  LatentSum sums[ROWS];
  UNROLL
  for (uint r = 0; r < ROWS; r++) {
    uint head = first_head + r;
    read_query<K_DIM>(query_of(queries, strides, number, head, head < heads), scale, lane,
                      query + r * OF_LATENT);
    read_query<V_DIM>(query_of(position_queries, p_strides, number, head, head < heads), LOG2_E, lane,
                      position_query + r * OF_POSITION);
    sums[r].clear();
  }
  DEVICE const int* row = pages.row(number);
  Seen seen = seen_tokens(row, pages.parameter(WINDOW));
  uint tiles = pages.parameter(SPLIT_TILES), first = seen.begin / SIMDGROUPS + place.y * tiles;
  for (uint at = first; at < first + tiles && at * SIMDGROUPS < seen.end; at++) {
    uint position = at * SIMDGROUPS, token = position + place.simdgroup;
    uint entry = uint(row[ROW_FIELDS + position / PAGE_SIZE]), slot = token % PAGE_SIZE;
    if (token >= seen.begin && token < seen.end) {
      SHARED float* to = tile + place.simdgroup * TOKEN;
      decode_token<K_DIM>(pages.slots(entry, 0, K_DIM, false), slot, lane, to);
      decode_token<V_DIM>(pages.slots(entry, 0, V_DIM, true), slot, lane, to + K_DIM);
    }
    threads_meet();
    uint begin = seen.begin > position ? seen.begin - position : 0;
    uint end = smaller(seen.end - position, SIMDGROUPS);
    UNROLL
    for (uint r = 0; r < ROWS; r++)
      sums[r].add(query + r * OF_LATENT, position_query + r * OF_POSITION, begin, end, lane, tile);
    threads_meet();
  }
  UNROLL
  for (uint r = 0; r < ROWS; r++) {
    if (first_head + r >= heads) continue;
    ulong at = (number * heads + first_head + r) * ulong(pages.parameter(SPLITS)) + place.y;
    if (lane == 0) measures[at * 2] = sums[r].maximum, measures[at * 2 + 1] = sums[r].sum;
    store_numbers<K_DIM>(sums[r].values, 1.0f, lane, partials + at * K_DIM);
  }
}
