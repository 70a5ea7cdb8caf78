// Whole pages into other pages, also of other formats. A simdgroup takes one row: a token's keys, or
// values, of one head. A row of the tables is two entries: from, to.

namespace paged_kv {

template <typename T, uint DIM>
inline void copy_side(const THREAD Pages& pages, const THREAD Place& place, bool values) {
  DEVICE const int* pair = pages.row(place.z / 2);
  Rows from = pages.rows(uint(pair[0]), place.y, DIM, values);
  Rows to = pages.rows(uint(pair[1]), place.y, DIM, values);
  uint token = place.x * ROW_SIMDGROUPS + place.simdgroup;
  if (from.format != to.format || from.rotated != to.rotated) {
    float x[numbers_of_lane(DIM)];
    read_row<T, DIM>(from, token, place.lane, x);
    if (from.rotated != to.rotated && DIM % LANES == 0) rotate<DIM>(x, place.lane);
    write_row<T, DIM>(target_of(to), token, place.lane, x);
    return;
  }
  Target target = target_of(to);
  uint words = row_words(from.format, DIM), scales = DIM / GROUP;
  for (uint i = place.lane; i < words; i += LANES)
    target.numbers[token * words + i] = from.numbers[token * words + i];
  for (uint i = place.lane; from.format != FLOATS && i < scales; i += LANES)
    target.scales[token * scales + i] = from.scales[token * scales + i];
}

}  // namespace paged_kv
