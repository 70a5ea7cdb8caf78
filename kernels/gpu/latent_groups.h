// Latent attention of groups of sequences to the pages that they share, on matrix units.
//
// A query row is a head of one of a group's sequences, one sequence after the other, as in prefill_plan.h.
// A threadgroup reads a tile of tokens once for all of its rows, which simdgroups share as in wide.h: each
// sums its own columns of the latents.

// Loads a tile in the plain basis.
void load_latents(Tile tile, Slots latents, Slots position_keys, const THREAD Place& place, SHARED T* to) {
  threads_meet();
  decode_tile<K_DIM>(tile, latents, place, to);
  decode_tile<V_DIM>(tile, position_keys, place, to + K_DIM);
  threads_meet();
}

template <typename Strides>
void attend_latent_groups(DEVICE const T* queries, Strides strides, DEVICE const T* position_queries,
                          Strides p_strides, DEVICE const int* groups, DEVICE float* partials,
                          DEVICE float* measures, const THREAD Pages& pages, const THREAD Place& place,
                          SHARED T* tile_numbers, SHARED float* all_logits) {
  DEVICE const int* group = groups + place.z * GROUP_FIELDS;
  Rows rows = {group, place.x * BLOCK_ROWS};
  Block block = block_of_group(pages, rows);
  // Of any of the sequences: they have the same pages here.
  DEVICE const int* table = pages.row(group[2] < 0 ? 0 : uint(group[2]));
  uint lane = place.lane, sharer = place.simdgroup % SHARERS;
  uint first_row = place.simdgroup / SHARERS * SIMDGROUP_ROWS;
  QueryRow own[LANE_ROWS];
  Query asked[LANE_ROWS], asked_positions[LANE_ROWS];
  for (uint k = 0; k < LANE_ROWS; k++) {
    QueryRow row = own[k] = query_row(pages, rows, first_row + row_in_matrix(lane, k));
    asked[k] = query_of(queries, strides, row.sequence, row.head, row.is_there);
    asked_positions[k] = query_of(position_queries, p_strides, row.sequence, row.head, row.is_there);
  }
  float scale = float_of_bits(pages.parameter(SCALE)) / LOG2_E;
  Softmax softmax;
  softmax.clear();
  for (uint at = block.begin / TILE_TOKENS * TILE_TOKENS; at < block.end; at += TILE_TOKENS) {
    uint entry = uint(table[ROW_FIELDS + at / PAGE_SIZE]);
    Tile tile = {false, at % PAGE_SIZE, at, block.begin, block.end};
    load_latents(tile, pages.slots(entry, 0, K_DIM, false), pages.slots(entry, 0, V_DIM, true), place,
                 tile_numbers);
    float logits[LOGITS];
    for (uint i = 0; i < LOGITS; i++) logits[i] = 0.0f;
    add_products_in_memory(asked, K_DIM, sharer, SHARERS, tile_numbers, lane, logits);
    for (uint i = 0; i < LOGITS; i++) logits[i] *= scale;
    add_products_in_memory(asked_positions, V_DIM, sharer, SHARERS, tile_numbers + K_DIM, lane, logits);
    for (uint i = 0; i < LOGITS; i++) logits[i] *= LOG2_E;
    sum_of_sharers(place, all_logits, logits);
    for (uint k = 0; k < LANE_ROWS; k++) softmax.weigh(k, own[k].begin, own[k].end, tile, lane, logits);
    add_weighted(tile_numbers + sharer * WIDTH, lane, logits, softmax.values);
  }
  for (uint k = 0; k < LANE_ROWS; k++) {
    float total = sum_of_row(softmax.sum[k]);
    if (!own[k].has_place) continue;
    ulong to = own[k].place * ulong(pages.parameter(GQA_GROUP_SIZE)) + own[k].head;
    if (sharer + column_in_matrix(lane) == 0) measures[to * 2] = softmax.maximum[k], measures[to * 2 + 1] = total;
    softmax.store(k, true, lane, partials + to * K_DIM + sharer * WIDTH);
  }
}
