// Summaries of the keys of full pages, and their scores: kernels/pages/page_format.py and choice.py for kernels.

CONSTANT uint RUN_TOKENS = 32;  // with one summary, and chosen together
CONSTANT uint RUNS_OF_PAGE = PAGE_SIZE / RUN_TOKENS;
CONSTANT float LOG_OF_RUN = 3.4657359f;
CONSTANT uint SUMMARY = 2 * K_DIM;                     // numbers of one: means, then variances
CONSTANT float LARGEST_SUMMARY = 65504.0f;             // float16's largest number

// The summaries of a head's keys in a page, [RUNS_OF_PAGE, SUMMARY] in float16. They are what a page ends with.
DEVICE const ushort* summaries_of(const THREAD Pages& pages, uint entry, uint head) {
  uint stride = pages.parameter(SLAB_STRIDE), slab = entry / stride;
  ulong words = ulong(pages.layouts[slab * LAYOUT_FIELDS]), after = entry - slab * stride + 1;
  return pages.slabs.memory[slab] + after * words - (pages.parameter(KV_HEADS) - head) * (RUNS_OF_PAGE * SUMMARY);
}

ushort summary_bits(float x) {
  return half_of_float(smaller(larger(x, -LARGEST_SUMMARY), LARGEST_SUMMARY));
}

// Summarises some tokens of a page of floats: a simdgroup takes those of one summary. A row of the tables is
// an entry. Keys are read twice, the second time from the cache: a sum of squares would lose the variance
// of keys that are far from zero.
void summarise(const THREAD Pages& pages, const THREAD Place& place) {
  uint entry = uint(pages.row(place.z)[0]), number = place.x * SLOT_SIMDGROUPS + place.simdgroup;
  Slots keys = pages.slots(entry, place.y, K_DIM, false);
  float x[numbers_of_lane(K_DIM)], mean[numbers_of_lane(K_DIM)], variance[numbers_of_lane(K_DIM)];
  for (uint i = 0; i < numbers_of_lane(K_DIM); i++) mean[i] = variance[i] = 0.0f;
  for (uint token = 0; token < RUN_TOKENS; token++) {
    read_slot<K_DIM>(keys, number * RUN_TOKENS + token, place.lane, x);
    for (uint i = 0; i < numbers_of_lane(K_DIM); i++) mean[i] += x[i] * (1.0f / RUN_TOKENS);
  }
  for (uint token = 0; token < RUN_TOKENS; token++) {
    read_slot<K_DIM>(keys, number * RUN_TOKENS + token, place.lane, x);
    for (uint i = 0; i < numbers_of_lane(K_DIM); i++) {
      float difference = x[i] - mean[i];
      variance[i] = multiply_add(difference, difference * (1.0f / RUN_TOKENS), variance[i]);
    }
  }
  DEVICE ushort* summary = (DEVICE ushort*)summaries_of(pages, entry, place.y) + number * SUMMARY;
  for (uint i = 0; i < numbers_of_lane(K_DIM); i++) {
    uint at = i * LANES + place.lane;
    if (at >= K_DIM) continue;
    summary[at] = summary_bits(mean[i]);
    summary[K_DIM + at] = summary_bits(variance[i]);
  }
}

// A token's share of the copy of a page: one of the summaries of a head.
void copy_summary(const THREAD Pages& pages, uint from, uint to, const THREAD Place& place) {
  uint number = place.x * SLOT_SIMDGROUPS + place.simdgroup;
  if (number >= RUNS_OF_PAGE) return;
  DEVICE const ushort* source = summaries_of(pages, from, place.y) + number * SUMMARY;
  DEVICE ushort* target = (DEVICE ushort*)summaries_of(pages, to, place.y) + number * SUMMARY;
  for (uint i = place.lane; i < SUMMARY; i += LANES) target[i] = source[i];
}

// Scaled queries and half of their squares, to be multiplied with means and variances: [ROWS, SUMMARY].
template <typename Strides>
void stage_powers(DEVICE const T* queries, Strides strides, float scale, uint count, uint index,
                  SHARED float* staged) {
  for (uint i = index; i < ROWS * K_DIM; i += SIMDGROUPS * LANES) {
    uint r = i / K_DIM, at = i % K_DIM;
    float x = r < count ? float(queries[r * ulong(strides[1]) + at * ulong(strides[3])]) * scale : 0.0f;
    staged[r * SUMMARY + at] = x;
    staged[r * SUMMARY + K_DIM + at] = 0.5f * x * x;
  }
}

// Products of each query with the means of a summary, or with half of the variances, of which each of four
// lanes has a part; all of them get the sums.
void multiply_summary(DEVICE const ushort* summary, uint first, uint lane, SHARED const float* staged,
                      THREAD float* sums) {
  for (uint r = 0; r < ROWS; r++) sums[r] = 0.0f;
  for (uint at = first + lane % 4 * 8; at < first + K_DIM; at += 32) {
    uint words[4];
    load<16>(summary + at, words);
    float x[8];
    for (uint i = 0; i < 8; i++) x[i] = float_of_half(ushort(words[i / 2] >> i % 2 * 16));
    UNROLL
    for (uint r = 0; r < ROWS; r++) {
      SHARED const float4* query = (SHARED const float4*)(staged + r * SUMMARY + at);
      float4 low = query[0], high = query[1];
      const float q[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      UNROLL
      for (uint i = 0; i < 8; i++) sums[r] = multiply_add(x[i], q[i], sums[r]);
    }
  }
  for (uint r = 0; r < ROWS; r++) {
    sums[r] += from_lane_xor(sums[r], 1);
    sums[r] += from_lane_xor(sums[r], 2);
  }
}

// What the spread of keys adds to a score: kernels/pages/choice.py says why it is bounded.
float bounded_spread(float spread) {
  return spread > LOG_OF_RUN ? 2.0f * root(LOG_OF_RUN * spread) - LOG_OF_RUN : spread;
}

// The logarithm of the mean weight that each query is expected to give to the tokens of each run, up to a
// constant: scores [B, kv_heads, gqa_group_size, TOKENS / 32]. A simdgroup takes a page, for ROWS query
// heads. Of pages that are not full, or hold the last token, it says 0, and does not read them.
template <typename Strides>
void score(DEVICE const T* queries, Strides strides, const THREAD Pages& pages, const THREAD Place& place,
           SHARED float* staged, DEVICE float* scores) {
  uint heads = pages.parameter(KV_HEADS), gqa_group_size = pages.parameter(GQA_GROUP_SIZE);
  uint head = place.y % heads, first_row = place.y / heads * ROWS;
  uint first_head = head * gqa_group_size + first_row;
  DEVICE const T* asked = queries + place.z * ulong(strides[0]) + first_head * ulong(strides[1]);
  float scale = float_of_bits(pages.parameter(SCALE));
  stage_powers(asked, strides, scale, gqa_group_size - first_row, place.index, staged);
  threads_meet();
  DEVICE const int* row = pages.row(place.z);
  uint page = place.x * SIMDGROUPS + place.simdgroup, count = pages.parameter(TOKENS) / RUN_TOKENS;
  if (page * RUNS_OF_PAGE >= count) return;
  float sums[ROWS];
  for (uint r = 0; r < ROWS; r++) sums[r] = 0.0f;
  if (!row[ROW_PADDING] && int((page + 1) * PAGE_SIZE) < row[ROW_LENGTH]) {
    DEVICE const ushort* summaries = summaries_of(pages, uint(row[ROW_FIELDS + page]), head);
    DEVICE const ushort* summary = summaries + place.lane / 4 * SUMMARY;
    float spreads[ROWS];
    multiply_summary(summary, 0, place.lane, staged, sums);
    multiply_summary(summary, K_DIM, place.lane, staged, spreads);
    for (uint r = 0; r < ROWS; r++) sums[r] += bounded_spread(spreads[r]);
  }
  ulong first = (place.z * ulong(heads) + head) * gqa_group_size + first_row;
  for (uint r = 0; r < ROWS; r++)
    if (first_row + r < gqa_group_size && place.lane % 4 == r % 4)
      scores[(first + r) * count + page * RUNS_OF_PAGE + place.lane / 4] = sums[r];
}
