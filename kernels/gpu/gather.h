// Keys and values collected from pages and from a step that no page holds yet. A simdgroup takes one
// row: a token's keys, or values, of one head.

namespace paged_kv {

// Where a place of what is gathered comes from.
struct Source {
  bool is_there, in_tail;
  uint at;  // position, or token of the step
};

inline Source source_of(DEVICE const int* row, uint place, uint tokens, uint tail) {
  uint length = uint(row[0]), padding = uint(row[1]), head = uint(row[2]), first = uint(row[3]);
  uint visible = head + length - first, end = tokens - padding, begin = end - visible;
  if (place < begin || place >= end) return {false, false, 0};
  uint number = place - begin, position = number < head ? number : number - head + first;
  uint tail_begin = tail > visible + padding ? tail - visible - padding : 0;
  uint in_tail = tail > padding ? tail - padding - tail_begin : 0, in_pages = length - in_tail;
  if (position < in_pages) return {true, false, position};
  return {true, true, tail_begin + position - in_pages};
}

template <typename T, uint DIM, typename Strides>
inline void gather_side(DEVICE const T* tail, Strides strides, const THREAD Pages& pages,
                        const THREAD Place& place, bool values, DEVICE T* output) {
  uint number = place.z / 2, tokens = pages.parameter(TOKENS);
  uint token = place.x * ROW_SIMDGROUPS + place.simdgroup;
  if (token >= tokens) return;
  DEVICE const int* row = pages.row(number);
  Source source = source_of(row, token, tokens, pages.parameter(TAIL));
  float x[numbers_of_lane(DIM)];
  for (uint i = 0; i < numbers_of_lane(DIM); i++) x[i] = 0.0f;
  if (source.is_there && source.in_tail)
    read_step<T, DIM>(tail, strides, number, place.y, source.at, place.lane, x);
  if (source.is_there && !source.in_tail) {
    uint entry = uint(row[ROW_FIELDS + source.at / PAGE_SIZE]);
    Rows rows = pages.rows(entry, place.y, DIM, values);
    read_row<T, DIM>(rows, source.at % PAGE_SIZE, place.lane, x);
    if (rows.rotated && DIM % LANES == 0) rotate<DIM>(x, place.lane);
  }
  ulong first = ((number * pages.parameter(KV_HEADS) + place.y) * ulong(tokens) + token) * DIM;
  for (uint i = 0; i < numbers_of_lane(DIM); i++) {
    uint at = i * LANES + place.lane;
    if (at < DIM) output[first + at] = T(x[i]);
  }
}

}  // namespace paged_kv
