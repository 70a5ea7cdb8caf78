// Gathers keys and values from pages and from unwritten keys and values. A simdgroup takes one row: a
// token's keys, or values, of one head.

// The source of an output token.
struct Source {
  bool is_there, in_tail;
  uint at;  // position, or token of the step
};

Source source_of(DEVICE const int* row, uint place, uint tokens, uint tail) {
  uint length = uint(row[0]), padding = uint(row[1]), head = uint(row[2]), first = uint(row[3]);
  uint visible = head + length - first, end = tokens - padding, begin = end - visible;
  if (place < begin || place >= end) return {false, false, 0};
  uint number = place - begin, position = number < head ? number : number - head + first;
  uint tail_begin = tail > visible + padding ? tail - visible - padding : 0;
  uint in_tail = tail > padding ? tail - padding - tail_begin : 0, in_pages = length - in_tail;
  if (position < in_pages) return {true, false, position};
  return {true, true, tail_begin + position - in_pages};
}

template <uint DIM>
void gather_page(DEVICE const int* row, Source source, const THREAD Pages& pages,
                        const THREAD Place& place, bool values, THREAD float* x) {
  uint entry = uint(row[ROW_FIELDS + source.at / PAGE_SIZE]);
  Rows rows = pages.rows(entry, place.y, DIM, values);
  read_row<DIM>(rows, source.at % PAGE_SIZE, place.lane, x);
#ifdef HAS_CODES
  if (rows.rotated && DIM % LANES == 0) rotate<DIM>(x, place.lane);
#endif
}

#ifdef TAIL
template <uint DIM, typename Strides>
void gather_side(DEVICE const T* tail, Strides strides, const THREAD Pages& pages,
                        const THREAD Place& place, bool values, DEVICE T* output) {
#else
template <uint DIM>
void gather_side(const THREAD Pages& pages, const THREAD Place& place, bool values,
                        DEVICE T* output) {
#endif
  uint number = place.z / 2, tokens = pages.parameter(TOKENS);
  uint token = place.x * ROW_SIMDGROUPS + place.simdgroup;
  if (token >= tokens) return;
  DEVICE const int* row = pages.row(number);
  Source source = source_of(row, token, tokens, pages.parameter(TAIL_TOKENS));
  float x[numbers_of_lane(DIM)];
  for (uint i = 0; i < numbers_of_lane(DIM); i++) x[i] = 0.0f;
#ifdef TAIL
  if (source.is_there && source.in_tail)
    read_step<DIM>(tail, strides, number, place.y, source.at, place.lane, x);
#endif
  if (source.is_there && !source.in_tail) gather_page<DIM>(row, source, pages, place, values, x);
  ulong first = ((number * pages.parameter(KV_HEADS) + place.y) * ulong(tokens) + token) * DIM;
  store_row<DIM>(x, 1.0f, place.lane, output + first);
}
