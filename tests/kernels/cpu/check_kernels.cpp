// Checks the CPU kernels without Python: random batches on every instruction set, against sums in
// double. For machines that cannot run the Python tests, such as an emulated one.
//
// Numbers are multiples of 1/32 below 4, which every format of floats holds exactly. Steps are written
// to pages of floats, and full pages are then recoded. What those hold is decoded here from their bytes.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "../../../kernels/cpu/paged_kv_cpu.h"

namespace {

constexpr int PAGE = 256, GROUP = 32, RUN = 32, RUNS = PAGE / RUN;
constexpr int READ = 448;  // tokens of a step that chooses: 14 runs
constexpr int SIZES[] = {4, 2, 2};
constexpr double TOLERANCES[] = {5e-5, 4e-3, 3e-2};  // outputs are rounded to the queries' dtype
// Where queries may be rounded to bytes. 500 batches came to 0.17 and 0.07: logits are large here.
constexpr double ROUNDED_OUTPUT = 0.3;

std::mt19937 random_bits;

int pick(int low, int high) { return low + random_bits() % (high - low + 1); }
template <size_t N>
int pick_of(const int (&choices)[N]) {
  return choices[pick(0, N - 1)];
}

uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

void encode(int format, float x, char* to) {
  uint32_t bits = bits_of(x);
  if (format == PAGED_KV_F32) {
    memcpy(to, &bits, 4);
    return;
  }
  uint16_t half = bits >> 16;
  if (format == PAGED_KV_F16) half = x == 0 ? 0 : (bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - 0x38000000) >> 13;
  memcpy(to, &half, 2);
}

float decode(int format, const char* from) {
  uint32_t bits = 0;
  memcpy(&bits, from, SIZES[format]);
  if (format == PAGED_KV_BF16) bits <<= 16;
  if (format == PAGED_KV_F16) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double magnitude = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return (float)(bits >> 15 ? -magnitude : exponent == 31 ? NAN : magnitude);
  }
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

int64_t row_bytes(int format, int dim) {
  return format > PAGED_KV_Q8 ? dim / 2 : format == PAGED_KV_Q8 ? dim : dim * SIZES[format];
}
int scale_group(int format, int dim) {
  return std::min(dim & -dim, format == PAGED_KV_Q8 ? 32 : format == PAGED_KV_Q4 ? 64 : 128);
}
int fifth_bytes(int format, int dim) { return format == PAGED_KV_Q5 ? dim / 8 : 0; }
int64_t scale_bytes(int format, int dim) {
  return format < PAGED_KV_Q8 ? 0 : fifth_bytes(format, dim) + dim / scale_group(format, dim) * 2;
}

double decode_number(int format, const char* row, const char* scales, int d, int dim) {
  if (format < PAGED_KV_Q8) return decode(format, row + d * SIZES[format]);
  double scale = decode(PAGED_KV_F16, scales + fifth_bytes(format, dim) + d / scale_group(format, dim) * 2);
  if (format == PAGED_KV_Q8) return scale * (signed char)row[d];
  int j = d % GROUP;
  unsigned char byte = row[d / GROUP * 16 + j % 16];
  int code = j < 16 ? byte & 15 : byte >> 4;
  if (format == PAGED_KV_Q4) return scale * (code - 8);
  return scale * (code + (scales[d / GROUP * 4 + j % 4] >> j / 4 & 1) * 16 - 16);
}

// The Hadamard transform by its definition.
std::vector<double> rotated(const std::vector<double>& x) {
  int dim = (int)x.size(), size = dim & -dim;
  std::vector<double> y(dim);
  double scale = 1 / sqrt(size);
  for (int i = 0; i < dim; i++) {
    int first = i / size * size;
    for (int j = 0; j < size; j++)
      y[i] += x[first + j] * (__builtin_popcount((i - first) & j) % 2 ? -scale : scale);
  }
  return y;
}

// An array of four dimensions, its last two or three permuted in memory as a model's may be.
struct Array {
  int64_t shape[4], strides[4];
  int format;
  std::vector<char> memory;
  PagedKvTensor tensor{};

  // `most` is the largest number times 32, and 0 for an array that is not filled.
  Array(int f, int64_t a, int64_t b, int64_t c, int64_t d, bool transposed = false, int most = 127)
      : shape{a, b, c, d}, strides{b * c * d, c * d, d, 1}, format(f) {
    if (transposed) strides[1] = d, strides[2] = b * d;
    memory.resize(a * b * c * d * SIZES[f]);
    for (int64_t i = 0; most && i < a * b * c * d; i++)
      encode(f, (float)pick(-most, most) / 32, memory.data() + i * SIZES[f]);
    tensor.data = memory.data();
    tensor.ndim = 4;
    tensor.type_code = f == PAGED_KV_BF16 ? 4 : 2;
    tensor.type_bits = (uint8_t)(SIZES[f] * 8);
    tensor.type_lanes = 1;
    tensor.shape = shape;
    tensor.strides = strides;
  }
  Array(const Array&) = delete;

  double at(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return decode(format, memory.data() + place_of(a, b, c, d));
  }

  // Makes numbers that 8 bits and a scale hold as they are once rotated: four numbers and zeros in each
  // block that is rotated. They become four whole numbers again and again, with signs and a scale. The
  // largest is 127.
  void fit_into_bytes() {
    int block = (int)(shape[3] & -shape[3]), size = SIZES[format];
    for (int64_t i = 0; i < shape[0] * shape[1] * shape[2]; i++)
      for (int64_t first = 0; first < shape[3]; first += block) {
        char* to = memory.data() + place_of(i / shape[2] / shape[1], i / shape[2] % shape[1], i % shape[2], first);
        for (int d = 0; d < block; d++) encode(format, 0, to + d * size);
        // With an even sum, so that 8 bits hold their sums with other signs too.
        int whole[] = {127, pick(-127, 127), pick(-127, 127), pick(-127, 126)}, at = 4 * pick(0, block / 4 - 1);
        whole[3] += (whole[0] + whole[1] + whole[2] + whole[3]) & 1;
        for (int d = 0; d < 4; d++) {
          int sum = 0;
          for (int k = 0; k < 4; k++) sum += __builtin_popcount(d & k) % 2 ? -whole[k] : whole[k];
          encode(format, (float)sum / 16, to + (at + d) * size);
        }
      }
  }

 private:
  int64_t place_of(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return (a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]) * SIZES[format];
  }
};

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "FAILED: %s\n", what.c_str());
  exit(1);
}

void expect(bool holds, const std::string& what) {
  if (!holds) fail(what);
}

struct Case {
  bool latent;  // keys are latents, and values are position keys
  int batch = pick(1, 3), heads = latent ? 1 : pick(1, 3);
  int gqa_group_size = latent ? pick_of({1, 3, 8, 16, 40}) : pick_of({1, 2, 3, 4, 5, 7, 8, 16});
  int k_dim = any_dim(), v_dim = pick(0, 1) ? k_dim : any_dim();
  int k_dtype = pick(0, 2), v_dtype = pick(0, 2), q_format = pick(0, 2);
  int steps = pick_of({1, 1, 2, 5, 40, 130});
  bool causal = pick(0, 3), has_new = pick(0, 1), sinks = pick(0, 1);
  bool fits_into_bytes = k_dim % GROUP == 0 && pick(0, 1);  // the queries, once rotated
  int window = pick(0, 2) ? 0 : pick(1, 400);
  float scale = 1 / sqrtf((float)k_dim);
  float softcap = pick(0, 2) ? 0 : (float)pick(1, 8) / 4;
  bool has_summaries = !latent && pick(0, 1);
  std::vector<int32_t> lengths, padding;

  std::vector<std::vector<char>> slabs;
  std::vector<char*> bases;
  // Where tokens are written, and where they are once full pages are recoded.
  std::vector<int32_t> written, tables, slab_layouts{0, 1, 2};
  std::vector<PagedKvLayout> layouts;
  PagedKvPages pages{};
  PagedKvMetadata metadata{};

  explicit Case(bool is_latent) : latent(is_latent) {
    for (int b = 0; b < batch; b++) {
      lengths.push_back(pick_of({1, 3, 255, 256, 257, 511, 700}));
      padding.push_back(pick(0, 2) ? 0 : pick(0, steps));
    }
    make_pages();
  }

  struct Choosing {};
  // A step of one token, which may leave out some: in float32, so that both sides choose alike.
  explicit Case(Choosing) : latent(false) {
    steps = 1, window = 0, has_new = fits_into_bytes = false, has_summaries = true, q_format = PAGED_KV_F32;
    for (int b = 0; b < batch; b++) {
      lengths.push_back(pick_of({300, READ, READ + 1, 511, 512, 513, 700, 768}));
      padding.push_back(0);
    }
    make_pages();
  }

  static int any_dim() { return pick(0, 1) ? GROUP * pick(1, 5) : 8 * pick(1, 20); }

  // Floats of the dtype, or codes where these can hold such vectors.
  static int any_format(int dtype, int dim, int small) {
    return dim % GROUP || pick(0, 1) ? dtype : pick_of({PAGED_KV_Q8, small});
  }

  PagedKvLayout layout_of(int k_format, int v_format) const {
    PagedKvLayout layout{};
    layout.k_format = k_format;
    layout.v_format = v_format;
    int64_t rows = (int64_t)heads * PAGE;
    layout.key_scales = rows * row_bytes(layout.k_format, k_dim);
    layout.values = layout.key_scales + rows * scale_bytes(layout.k_format, k_dim);
    if (layout.k_format == PAGED_KV_Q5) {
      layout.key_centres = layout.values;
      layout.values += heads * k_dim * SIZES[PAGED_KV_F16];
    }
    layout.value_scales = layout.values + rows * row_bytes(layout.v_format, v_dim);
    layout.page_bytes = layout.value_scales + rows * scale_bytes(layout.v_format, v_dim);
    if (has_summaries) {
      layout.summaries = layout.page_bytes;
      layout.page_bytes += heads * RUNS * summary_bytes();
    }
    return layout;
  }

  // A slab of floats and two others, of pages in any order, full of NaN: all bits set are one in each
  // format.
  void make_pages() {
    constexpr int STRIDE = 64;
    int each = batch * 3;
    std::vector<int32_t> free_entries;
    for (int slab = 0; slab < 3; slab++) {
      layouts.push_back(slab ? layout_of(any_format(k_dtype, k_dim, PAGED_KV_Q5),
                                         any_format(v_dtype, v_dim, PAGED_KV_Q4))
                             : layout_of(k_dtype, v_dtype));
      slabs.emplace_back(each * layouts[slab].page_bytes, (char)0xff);
      for (int page = 0; page < each; page++) (slab ? free_entries : written).push_back(slab * STRIDE + page);
    }
    for (auto& slab : slabs) bases.push_back(slab.data());
    std::shuffle(written.begin(), written.end(), random_bits);
    std::shuffle(free_entries.begin(), free_entries.end(), random_bits);
    tables = written;
    for (int i = 0; i < each; i++)
      if (i % 3 < lengths[i / 3] / PAGE) tables[i] = free_entries[i];
    pages = {bases.data(), slab_layouts.data(), layouts.data(), STRIDE, heads, k_dim, v_dim, k_dtype, v_dtype};
    metadata = {tables.data(), lengths.data(), padding.data(), batch, 3};
  }

  // Writes a step to pages of floats, and recodes the full ones.
  void write(const PagedKvTensor& keys, const PagedKvTensor& values) const {
    PagedKvMetadata at = metadata;
    at.block_tables = written.data();
    expect(!paged_kv_write(&pages, &at, &keys, &values), "write: " + name());
    std::vector<int32_t> from, to;
    for (size_t i = 0; i < tables.size(); i++)
      if (tables[i] != written[i]) from.push_back(written[i]), to.push_back(tables[i]);
    expect(!paged_kv_copy(&pages, from.data(), to.data(), (int32_t)from.size()), "recode: " + name());
  }

  // A token's numbers in its page.
  struct Slot {
    char *numbers, *scales;
    int format, dim;
    char* centre;
  };

  Slot slot_of(bool values, int b, int head, int position) const {
    int32_t entry = tables[b * 3 + position / PAGE];
    const PagedKvLayout& layout = layouts[entry / pages.slab_stride];
    char* page = bases[entry / pages.slab_stride] + entry % pages.slab_stride * layout.page_bytes;
    int64_t row = head * PAGE + position % PAGE;
    int format = values ? layout.v_format : layout.k_format, dim = values ? v_dim : k_dim;
    bool is_centred = !values && layout.key_centres;
    char* centre = is_centred ? page + layout.key_centres + head * dim * SIZES[PAGED_KV_F16] : nullptr;
    return {page + (values ? layout.values : 0) + row * row_bytes(format, dim),
            page + (values ? layout.value_scales : layout.key_scales) + row * scale_bytes(format, dim), format,
            dim, centre};
  }

  // The numbers of a token as its page holds them.
  std::vector<double> held(bool values, int b, int head, int position) const {
    Slot slot = slot_of(values, b, head, position);
    std::vector<double> numbers;
    for (int d = 0; d < slot.dim; d++) {
      double centre = slot.centre ? decode(PAGED_KV_F16, slot.centre + d * SIZES[PAGED_KV_F16]) : 0;
      numbers.push_back(centre + decode_number(slot.format, slot.numbers, slot.scales, d, slot.dim));
    }
    return slot.format >= PAGED_KV_Q8 ? rotated(numbers) : numbers;
  }

  int64_t summary_bytes() const { return 2 * k_dim * SIZES[PAGED_KV_F16]; }

  // The mean, or the variance, of a number of the keys of a run, as a page holds it.
  double summary(int b, int head, int run, bool variance, int d) const {
    int32_t entry = tables[b * 3 + run / RUNS];
    const PagedKvLayout& layout = layouts[entry / pages.slab_stride];
    const char* page = bases[entry / pages.slab_stride] + entry % pages.slab_stride * layout.page_bytes;
    const char* of_run = page + layout.summaries + (head * RUNS + run % RUNS) * summary_bytes();
    return decode(PAGED_KV_F16, of_run + (variance * k_dim + d) * SIZES[PAGED_KV_F16]);
  }

  // The tokens that the query heads of a KV head read in a step of one token, ascending.
  std::vector<int> chosen(int b, int head, const std::vector<std::vector<double>>& queries) const {
    int length = lengths[b], last = (length - 1) / RUN, full = (length - 1) / PAGE * RUNS;
    std::vector<double> weights(full);
    for (const auto& query : queries) {
      std::vector<double> scores(full);
      double top = -INFINITY, total = 0;
      for (int run = 0; run < full; run++) {
        double spread = 0, most = log(RUN);
        for (int d = 0; d < k_dim; d++) {
          double x = query[d] * scale;
          scores[run] += x * summary(b, head, run, false, d);
          spread += x * x / 2 * summary(b, head, run, true, d);
        }
        scores[run] += spread > most ? 2 * sqrt(most * spread) - most : spread;
        top = std::max(top, scores[run]);
      }
      for (double score : scores) total += exp(score - top);
      for (int run = 0; run < full; run++) weights[run] += exp(scores[run] - top) / total;
    }
    int latest = std::min(full, last - 3), free = READ / RUN - 1 - (last - latest + 1);
    std::vector<int> runs, tokens;
    for (int run = 1; run < latest; run++) runs.push_back(run);
    std::sort(runs.begin(), runs.end(), [&](int x, int y) { return weights[x] > weights[y]; });
    runs.resize(free);
    runs.push_back(0);
    for (int run = latest; run <= last; run++) runs.push_back(run);
    std::sort(runs.begin(), runs.end());
    for (int run : runs)
      for (int t = run * RUN; t < std::min(length, (run + 1) * RUN); t++) tokens.push_back(t);
    return tokens;
  }

  // Fills a token's slots with NaN.
  void spoil(int b, int position) const {
    for (int i = 0; i < 2 * heads; i++) {
      Slot slot = slot_of(i % 2, b, i / 2, position);
      memset(slot.numbers, 0xff, row_bytes(slot.format, slot.dim));
      memset(slot.scales, 0xff, scale_bytes(slot.format, slot.dim));
    }
  }

  // For keys of 5 bits, if bytes do not hold the queries as they are.
  bool may_round_queries() const {
    if (latent || fits_into_bytes) return false;
    bool rounds = false;
    for (const PagedKvLayout& each : layouts) rounds |= each.k_format == PAGED_KV_Q5;
    return rounds && q_format != PAGED_KV_F32;
  }

  int out_dim() const { return latent ? k_dim : v_dim; }
  int own_begin(int b, int count) const { return std::max(0, count - lengths[b] - padding[b]); }
  int own_end(int b, int count) const { return std::max(own_begin(b, count), count - padding[b]); }

  std::string name() const {
    char text[300];
    snprintf(text, sizeof text,
             "latent %d batch %d heads %d gqa_group_size %d k_dim %d v_dim %d formats %d %d %d steps %d causal %d "
             "window %d softcap %g new %d sinks %d lengths %d.. padding %d..",
             latent, batch, heads, gqa_group_size, k_dim, v_dim, k_dtype, v_dtype, q_format, steps, causal, window,
             softcap, has_new, sinks, lengths[0], padding[0]);
    for (const PagedKvLayout& each : layouts)
      snprintf(text + strlen(text), sizeof text - strlen(text), " pages %d %d", each.k_format, each.v_format);
    return text;
  }
};

// The keys and values of every row, as one long step: row b's token p is at [b, :, longest - end + p].
struct Contents {
  int longest;
  Array keys, values;

  explicit Contents(const Case& c)
      : longest(longest_of(c)),
        keys(c.k_dtype, c.batch, c.heads, longest, c.k_dim, pick(0, 1)),
        values(c.v_dtype, c.batch, c.heads, longest, c.v_dim, pick(0, 1)) {}

  static int longest_of(const Case& c) {
    int longest = 0;
    for (int b = 0; b < c.batch; b++) longest = std::max(longest, c.lengths[b] + c.padding[b]);
    return longest;
  }
  int place(const Case& c, int b, int position) const {
    return longest - c.lengths[b] - c.padding[b] + position;
  }
};

// What attention sees of one head: the pages' numbers, then the unwritten ones.
struct Seen {
  std::vector<std::vector<double>> keys, values;

  Seen(const Case& c, const Contents& in, int b, int head, int in_pages) {
    for (int p = 0; p < in_pages; p++) {
      keys.push_back(c.held(false, b, head, p));
      values.push_back(c.held(true, b, head, p));
    }
    for (int p = in_pages; p < c.lengths[b]; p++) {
      keys.emplace_back(), values.emplace_back();
      for (int d = 0; d < c.k_dim; d++) keys[p].push_back(in.keys.at(b, head, in.place(c, b, p), d));
      for (int d = 0; d < c.v_dim; d++) values[p].push_back(in.values.at(b, head, in.place(c, b, p), d));
    }
  }
};

void check_query(const Case& c, const Seen& in, const Array& q, const Array& position_q, const Array& out,
                 const float* sinks, int b, int head, int step) {
  int first = c.own_begin(b, c.steps), end = c.own_end(b, c.steps);
  if (step < first || step >= end) {
    for (int d = 0; d < c.out_dim(); d++)
      expect(out.at(b, head, step, d) == 0, "padding gets zeros: " + c.name());
    return;
  }
  int position = c.lengths[b] - (end - step);
  int from = c.window ? std::max(0, position - c.window + 1) : 0;
  int to = c.causal || c.window ? position + 1 : c.lengths[b];
  const auto& summed = c.latent ? in.keys : in.values;
  std::vector<double> scores, sum(c.out_dim());
  double top = c.sinks ? sinks[head] : -INFINITY;
  for (int p = from; p < to; p++) {
    double score = 0;
    for (int d = 0; d < c.k_dim; d++) score += q.at(b, head, step, d) * in.keys[p][d];
    score *= c.scale;
    for (int d = 0; c.latent && d < c.v_dim; d++) score += position_q.at(b, head, step, d) * in.values[p][d];
    scores.push_back(c.softcap ? c.softcap * tanh(score / c.softcap) : score);
    top = std::max(top, scores.back());
  }
  double total = c.sinks ? exp(sinks[head] - top) : 0;
  for (int p = from; p < to; p++) {
    double weight = exp(scores[p - from] - top);
    total += weight;
    for (int d = 0; d < c.out_dim(); d++) sum[d] += weight * summed[p][d];
  }
  for (int d = 0; d < c.out_dim(); d++) {
    double error = fabs(out.at(b, head, step, d) - sum[d] / total);
    if (!(error <= (c.may_round_queries() ? ROUNDED_OUTPUT : TOLERANCES[c.q_format])))
      fail("attention is off by " + std::to_string(error) + ": " + c.name());
  }
}

// Floats are as they were, and codes within half a step of the largest number of a group, which a
// rotation may make sqrt(dim) times as large as the largest here.
void expect_kept(const Case& c, double held, double given, int format) {
  double most = format > PAGED_KV_Q8 ? 6 : format == PAGED_KV_Q8 ? 0.5 : 0;
  expect(fabs(held - given) <= most, "held: " + c.name());
}

void check_pages(const Case& c, const Contents& in) {
  for (int b = 0; b < c.batch; b++)
    for (int position = 0; position < c.lengths[b]; position++) {
      int t = in.place(c, b, position), last = c.heads - 1;
      const PagedKvLayout& layout = c.layouts[c.tables[b * 3 + position / PAGE] / c.pages.slab_stride];
      std::vector<double> k = c.held(false, b, 0, position), v = c.held(true, b, last, position);
      for (int d = 0; d < c.k_dim; d++) expect_kept(c, k[d], in.keys.at(b, 0, t, d), layout.k_format);
      for (int d = 0; d < c.v_dim; d++) expect_kept(c, v[d], in.values.at(b, last, t, d), layout.v_format);
    }
}

void check_summaries(const Case& c, const Contents& in) {
  for (int b = 0; b < c.batch; b++)
    for (int run = 0; run < c.lengths[b] / PAGE * RUNS; run++)
      for (int d = 0; d < c.k_dim; d++) {
        double mean = 0, squares = 0;
        int head = c.heads - 1, first = in.place(c, b, run * RUN);
        for (int t = 0; t < RUN; t++) {
          double x = in.keys.at(b, head, first + t, d);
          mean += x / RUN, squares += x * x / RUN;
        }
        double variance = squares - mean * mean;
        expect(fabs(c.summary(b, head, run, false, d) - mean) < 2e-3 * (1 + fabs(mean)), "mean: " + c.name());
        expect(fabs(c.summary(b, head, run, true, d) - variance) < 2e-3 * (1 + variance), "variance: " + c.name());
      }
}

// Full pages put back into pages of floats: what they hold is rounded to the dtype.
void check_copies(const Case& c) {
  Case back = c;
  for (size_t i = 0; i < c.tables.size(); i++) {
    if (c.tables[i] == c.written[i]) continue;
    back.tables[i] = c.written[i];
    expect(!paged_kv_copy(&c.pages, &c.tables[i], &back.tables[i], 1), "copy: " + c.name());
    int b = (int)i / 3, position = (int)i % 3 * PAGE + pick(0, PAGE - 1), head = pick(0, c.heads - 1);
    std::vector<double> held = c.held(false, b, head, position), found = back.held(false, b, head, position);
    for (int d = 0; d < c.k_dim; d++)
      expect(fabs(found[d] - held[d]) <= 0.005 * (1 + fabs(held[d])), "copied: " + c.name());
  }
}

void check_case(bool latent) {
  Case c(latent);
  Contents in(c);
  c.write(in.keys.tensor, in.values.tensor);
  check_pages(c, in);
  if (c.has_summaries) check_summaries(c, in);
  check_copies(c);

  Array q(c.q_format, c.batch, c.heads * c.gqa_group_size, c.steps, c.k_dim, pick(0, 1));
  if (c.fits_into_bytes) q.fit_into_bytes();
  // Small, because the scale is theirs already: a softmax of large scores has one weight.
  Array position_q(c.q_format, c.batch, c.heads * c.gqa_group_size, c.steps, c.v_dim, pick(0, 1), 8);
  Array out(c.q_format, c.batch, c.heads * c.gqa_group_size, c.steps, c.out_dim(), false, 0);
  std::vector<float> sinks(c.heads * c.gqa_group_size);
  for (float& sink : sinks) sink = (float)pick(-64, 64) / 32;
  int64_t sinks_shape[] = {(int64_t)sinks.size()};
  PagedKvTensor sinks_tensor{sinks.data(), 1, 0, 1, 2, 32, 1, sinks_shape, nullptr, 0};
  PagedKvOptions options{c.scale, c.causal, c.window, c.softcap, 0, c.sinks ? &sinks_tensor : nullptr,
                         nullptr, nullptr};

  // The unwritten keys and values stand for the last tokens, of which the pages' slots are spoilt.
  int new_tokens = c.has_new ? pick(1, 300) : 0;
  int64_t skipped = in.longest - std::min(new_tokens, in.longest);
  PagedKvTensor new_k = in.keys.tensor, new_v = in.values.tensor;
  int64_t k_shape[] = {c.batch, c.heads, in.longest - skipped, c.k_dim};
  int64_t v_shape[] = {c.batch, c.heads, in.longest - skipped, c.v_dim};
  new_k.shape = k_shape, new_v.shape = v_shape;
  new_k.byte_offset = skipped * in.keys.strides[2] * SIZES[c.k_dtype];
  new_v.byte_offset = skipped * in.values.strides[2] * SIZES[c.v_dtype];
  if (c.has_new) {
    options.new_k = &new_k, options.new_v = &new_v;
    for (int b = 0; b < c.batch; b++) {
      int last = (int)(in.longest - skipped);
      for (int p = c.lengths[b] - (c.own_end(b, last) - c.own_begin(b, last)); p < c.lengths[b]; p++) c.spoil(b, p);
    }
  }
  int status = paged_kv_attend(&c.pages, &c.metadata, &q.tensor, c.latent ? &position_q.tensor : nullptr,
                               &out.tensor, &options);
  expect(!status, "attend: " + c.name());
  for (int b = 0; b < c.batch; b++) {
    int last = (int)(in.longest - skipped);
    int num_new = c.has_new ? c.own_end(b, last) - c.own_begin(b, last) : 0;
    std::vector<Seen> seen;
    for (int head = 0; head < c.heads * c.gqa_group_size; head++) {
      if (head % c.gqa_group_size == 0) seen.emplace_back(c, in, b, head / c.gqa_group_size, c.lengths[b] - num_new);
      for (int step = 0; step < c.steps; step += pick(1, 60))
        check_query(c, seen.back(), q, position_q, out, sinks.data(), b, head, step);
    }
  }
}

// A step that reads chosen tokens, as attention to a row of these alone.
void check_choice() {
  Case c{Case::Choosing()};
  Contents in(c);
  c.write(in.keys.tensor, in.values.tensor);
  Array q(c.q_format, c.batch, c.heads * c.gqa_group_size, 1, c.k_dim, pick(0, 1));
  Array out(c.q_format, c.batch, c.heads * c.gqa_group_size, 1, c.v_dim, false, 0);
  c.sinks = false;
  PagedKvOptions options{c.scale, c.causal, 0, c.softcap, READ, nullptr, nullptr, nullptr};
  expect(!paged_kv_attend(&c.pages, &c.metadata, &q.tensor, nullptr, &out.tensor, &options), "choose: " + c.name());
  for (int b = 0; b < c.batch; b++)
    for (int kv_head = 0; kv_head < c.heads; kv_head++) {
      int first = kv_head * c.gqa_group_size, end = first + c.gqa_group_size;
      Seen seen(c, in, b, kv_head, c.lengths[b]);
      Case read = c;
      if (c.lengths[b] > READ) {
        std::vector<std::vector<double>> queries;
        for (int head = first; head < end; head++) {
          queries.emplace_back();
          for (int d = 0; d < c.k_dim; d++) queries.back().push_back(q.at(b, head, 0, d));
        }
        Seen all = seen;
        seen.keys.clear(), seen.values.clear();
        for (int t : c.chosen(b, kv_head, queries))
          seen.keys.push_back(all.keys[t]), seen.values.push_back(all.values[t]);
        read.lengths[b] = (int)seen.keys.size();
      }
      for (int head = first; head < end; head++)
        check_query(read, seen, q, q, out, nullptr, b, head, 0);
    }
}

}  // namespace

int main(int count, char** arguments) {
  int cases = count > 1 ? atoi(arguments[1]) : 100;
  std::string names = paged_kv_instruction_sets();
  for (size_t at = 0; at < names.size();) {
    std::string name = names.substr(at, names.find(',', at) - at);
    at += name.size() + 1;
    expect(!paged_kv_use_instruction_set(name.c_str()), "no instruction set " + name);
    for (int i = 0; i < cases; i++) {
      random_bits.seed(i);
      paged_kv_use_threads(1 + i % 3);
      check_case(i % 3 == 0);
      check_choice();
    }
    printf("%s: %d batches\n", name.c_str(), cases);
  }
  expect(paged_kv_use_instruction_set("abacus") != 0, "an unknown instruction set is refused");
  return 0;
}
