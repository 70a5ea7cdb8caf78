// Gathers keys and values from pages and from unwritten keys and values. A simdgroup takes one row: a
// token's keys, or values, of one head.

// The source of an output token.
struct Source {
  bool is_there, is_new;
  uint at;  // position, or token of the step
};

Source source_of(DEVICE const int* row, uint place, uint tokens, uint new_tokens) {
  uint length = uint(row[0]), padding = uint(row[1]), head = uint(row[2]), first = uint(row[3]);
  uint visible = head + length - first, end = tokens - padding, begin = end - visible;
  if (place < begin || place >= end) return {false, false, 0};
  uint number = place - begin, position = number < head ? number : number - head + first;
  uint new_begin = new_tokens > visible + padding ? new_tokens - visible - padding : 0;
  uint num_new = new_tokens > padding ? new_tokens - padding - new_begin : 0, in_pages = length - num_new;
  if (position < in_pages) return {true, false, position};
  return {true, true, new_begin + position - in_pages};
}

template <uint DIM>
void gather_page(DEVICE const int* row, Source source, const THREAD Pages& pages,
                        const THREAD Place& place, bool values, THREAD float* x) {
  uint entry = uint(row[ROW_FIELDS + source.at / PAGE_SIZE]);
  Slots slots = pages.slots(entry, place.y, DIM, values);
  read_slot<DIM>(slots, source.at % PAGE_SIZE, place.lane, x);
#ifdef HAS_CODES
  if (slots.is_rotated() && DIM % LANES == 0) rotate<DIM>(x, place.lane);
#endif
}

#ifdef HAS_NEW_TOKENS
template <uint DIM, typename Strides>
void gather_side(DEVICE const T* step, Strides strides, const THREAD Pages& pages,
                        const THREAD Place& place, bool values, DEVICE T* output) {
#else
template <uint DIM>
void gather_side(const THREAD Pages& pages, const THREAD Place& place, bool values,
                        DEVICE T* output) {
#endif
  uint number = place.z / 2, tokens = pages.parameter(TOKENS);
  uint token = place.x * SLOT_SIMDGROUPS + place.simdgroup;
  if (token >= tokens) return;
  DEVICE const int* row = pages.row(number);
  Source source = source_of(row, token, tokens, pages.parameter(NEW_TOKENS));
  float x[numbers_of_lane(DIM)];
  for (uint i = 0; i < numbers_of_lane(DIM); i++) x[i] = 0.0f;
#ifdef HAS_NEW_TOKENS
  if (source.is_there && source.is_new)
    read_step<DIM>(step, strides, number, place.y, source.at, place.lane, x);
#endif
  if (source.is_there && !source.is_new) gather_page<DIM>(row, source, pages, place, values, x);
  ulong first = ((number * pages.parameter(KV_HEADS) + place.y) * ulong(tokens) + token) * DIM;
  store_numbers<DIM>(x, 1.0f, place.lane, output + first);
}
