// Attention of a step of queries on matrix units, as in prefill.h, to heads of which a lane could not keep
// the sums of all columns.
//
// SHARERS simdgroups share some rows. Each multiplies some numbers of the queries with a tile's keys, and
// the sums of these products, which go through threadgroup memory, are the logits for all of them. Then
// each sums its own columns of the values. Queries, of which no memory near a threadgroup holds so many,
// are read from the cache for every tile. They are in the plain basis, and so is a tile.

CONSTANT uint LOGITS = TILE_TOKENS / 4 * LANE_ROWS;  // of a tile and lane

// The sums of what the simdgroups that share rows have, for each of them.
void sum_of_sharers(const THREAD Place& place, SHARED float* all, THREAD float* logits) {
  for (uint i = 0; i < LOGITS; i++) all[(place.simdgroup * LOGITS + i) * LANES + place.lane] = logits[i];
  threads_meet();
  uint first = place.simdgroup / SHARERS * SHARERS;
  for (uint i = 0; i < LOGITS; i++) {
    logits[i] = 0.0f;
    for (uint k = 0; k < SHARERS; k++) logits[i] += all[((first + k) * LOGITS + i) * LANES + place.lane];
  }
}

// Turns a tile's tokens into the model's dtype in the plain basis, each by one simdgroup.
template <uint DIM>
void decode_tile(Tile tile, Slots slots, const THREAD Place& place, SHARED T* to) {
  for (uint i = place.simdgroup; i < TILE_TOKENS; i += THREADS / LANES) {
    SHARED T* token = to + i * STRIDE;
    if (tile.position + i >= tile.begin && tile.position + i < tile.end)
      decode_token<DIM>(slots, tile.first + i, place.lane, token);
    else
      for (uint at = place.lane; at < DIM; at += LANES) token[at] = T(0.0f);
  }
}

// Loads a tile of keys or values in the plain basis.
#ifdef HAS_NEW_TOKENS
template <uint DIM, typename Strides>
void load_plain(Tile tile, Slots slots, DEVICE const T* step, Strides strides,
                const THREAD Place& place, SHARED T* to) {
#else
template <uint DIM>
void load_plain(Tile tile, Slots slots, const THREAD Place& place, SHARED T* to) {
#endif
#ifdef HAS_CODES
  if (slots.is_rotated() && !tile.is_new) {
    threads_meet();
    decode_tile<DIM>(tile, slots, place, to);
    threads_meet();
    return;
  }
#endif
#ifdef HAS_NEW_TOKENS
  load_tile<DIM>(tile, slots, step, strides, place, to);
#else
  load_tile<DIM>(tile, slots, place, to);
#endif
}

#ifdef SINKS
template <typename Strides, typename Sinks>
#else
template <typename Strides>
#endif
void prefill_wide(DEVICE const T* queries, Strides strides,
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
                  const THREAD Pages& pages, const THREAD Place& place, SHARED float* all_logits,
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
  uint lane = place.lane, sharer = place.simdgroup % SHARERS;
  uint first_row = place.simdgroup / SHARERS * SIMDGROUP_ROWS;
  Query asked[LANE_ROWS];
  uint begins[LANE_ROWS], ends[LANE_ROWS];
  for (uint k = 0; k < LANE_ROWS; k++) {
    QueryRow row = query_row(pages, work.rows, first_row + row_in_matrix(lane, k));
    uint head = place.y * pages.parameter(GQA_GROUP_SIZE) + row.head;
    asked[k] = query_of(queries + row.step * ulong(strides[2]), strides, row.sequence, head, row.is_there);
    begins[k] = row.begin, ends[k] = row.end;
  }
  float scale = float_of_bits(pages.parameter(SCALE));
  Softmax softmax;
  softmax.clear();
#ifdef HAS_SOFTCAP
  softmax.softcap = float_of_bits(pages.parameter(SOFTCAP));
#endif
  for (uint i = 0; i < work.tiles.count + work.tiles.count_new; i++) {
    Tile tile = tile_of(work.tiles, work.block, i);
    uint entry = tile.is_new ? 0 : uint(work.table[ROW_FIELDS + tile.position / PAGE_SIZE]);
    Slots keys = pages.slots(entry, place.y, K_DIM, false);
    Slots values = pages.slots(entry, place.y, V_DIM, true);
#ifdef HAS_NEW_TOKENS
    load_plain<K_DIM>(tile, keys, new_keys, k_strides, place, tile_numbers);
#else
    load_plain<K_DIM>(tile, keys, place, tile_numbers);
#endif
    float logits[LOGITS];
    for (uint n = 0; n < LOGITS; n++) logits[n] = 0.0f;
    add_products_in_memory(asked, K_DIM, sharer, SHARERS, tile_numbers, lane, logits);
    for (uint n = 0; n < LOGITS; n++) logits[n] *= scale;
    sum_of_sharers(place, all_logits, logits);
    for (uint k = 0; k < LANE_ROWS; k++) softmax.weigh(k, begins[k], ends[k], tile, lane, logits);
#ifdef HAS_NEW_TOKENS
    load_plain<V_DIM>(tile, values, new_values, v_strides, place, tile_numbers);
#else
    load_plain<V_DIM>(tile, values, place, tile_numbers);
#endif
    add_weighted(tile_numbers + sharer * WIDTH, lane, logits, softmax.values);
  }
  give_rows(softmax, work.rows, first_row, sharer * WIDTH,
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
