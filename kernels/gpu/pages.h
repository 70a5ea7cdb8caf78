// Finds the slots of tokens in pages: kernels/pages/page_format.py for kernels.
//
// kernels/gpu/arrays.py makes the 32-bit integers that describe pages and sequences.

CONSTANT uint PAGE_SIZE = 256;
CONSTANT uint LANES = 32;
CONSTANT uint GROUP = 32;  // numbers whose codes lie together
CONSTANT uint SLABS = 16;  // arguments; those that are not needed repeat the first

// How a slot holds numbers: in the model's dtype, or rotated as codes of 8, 4 or 5 bits: Q4 are values, and
// Q5 keys. HAS_FLOATS, HAS_Q8, HAS_Q4 and HAS_Q5 name the formats that a kernel variant reads, and HAS_CODES
// means any but the first. Other formats would only take registers.
CONSTANT uint FLOATS = 16, Q8 = 8, Q4 = 4, Q5 = 5;

// Logits are in base 2. A hidden one is NEVER, and a running maximum starts at LOWEST: the
// difference of the two is so far below zero that the weight is exactly 0.
CONSTANT float NEVER = -1e30f;
CONSTANT float LOWEST = -1e29f;
CONSTANT float LOG2_E = 1.44269504088896340736f;

// Softcapped attention: softcap * tanh(logit / softcap), by a power that cannot overflow.
float capped(float logit, float softcap) {
  float power = power_of_2(magnitude(logit) * (-2.0f * LOG2_E / softcap));
  float bounded = softcap * ((1.0f - power) / (1.0f + power));
  return logit < 0.0f ? -bounded : bounded;
}

// Numbers of the array `params`, by place.
enum Parameter {
  SLAB_STRIDE,   // a table entry is slab * SLAB_STRIDE + page
  TABLE_STRIDE,  // numbers of a row of the tables
  KV_HEADS,
  STEPS,         // tokens of the step
  GQA_GROUP_SIZE,         // query heads to a KV head
  SCALE,         // of base-2 logits: the bits of a float
  WINDOW,        // 0: none
  CAUSAL,
  SPLITS,        // parts of a sequence's context
  SPLIT_TILES,   // tiles of each
  NEW_TOKENS,   // unwritten tokens of a step
  TOKENS,        // gathered tokens; those that are scored, or that are read at most
  Q_HEADS,
  SOFTCAP,       // of base-2 logits: the bits of a float
  PARAMETERS
};

// The place of a thread; simdgroups are warps in CUDA.
struct Place {
  uint x, y, z;      // of the threadgroup in the grid
  uint simdgroup;    // in the threadgroup
  uint lane;
  uint index;        // in the threadgroup
};

struct Slabs {
  DEVICE const ushort* memory[SLABS];
};

// Keys or values of one head of one page, from its first token on.
struct Slots {
  DEVICE const ushort* numbers;
  DEVICE const ushort* scales;
#ifdef HAS_Q5
  DEVICE const ushort* centre;  // added to each number of a token; null where there is none
#endif
  uint format;

  bool is_rotated() const THREAD { return format != FLOATS; }
};

// Fields of a slab's layout: words of a page, then where keys' scales, values and their scales
// begin in it, how both are held, and where the centres of keys begin: 0 if there are none.
CONSTANT uint LAYOUT_FIELDS = 7;

// Fields of a row of the tables: tokens, right padding, valid (sink) tokens at the beginning, and the
// first valid token after those. Then of pages that sequences share: the tokens that groups of
// sequences read (kernels/pages/tables.py), and the first and the number of the places of
// what they found for this sequence. The table entries follow.
CONSTANT uint ROW_FIELDS = 7;
enum RowField { ROW_LENGTH, ROW_PADDING, ROW_HEAD, ROW_FIRST, PREFIX_TOKENS, FIRST_PLACE, PLACES };

// Words of a slot of one head, without fifth bits.
constexpr uint slot_words(uint format, uint dim) { return dim * (format == Q5 ? 4 : format) / 16; }

// The largest power of 2 that divides `dim`: so many numbers are rotated together.
constexpr uint rotated_block(uint dim) { return dim & (~dim + 1); }

// Numbers that share a scale: the most that divide the head size.
constexpr uint scale_group(uint format, uint dim) {
  uint most = format == Q8 ? 32 : format == Q4 ? 64 : 128;
  return rotated_block(dim) < most ? rotated_block(dim) : most;
}

// Words of a slot's fifth bits, and of those and its scales.
constexpr uint fifth_words(uint format, uint dim) { return format == Q5 ? dim / 16 : 0; }
constexpr uint scale_words(uint format, uint dim) {
  return fifth_words(format, dim) + dim / scale_group(format, dim);
}

struct Pages {
  Slabs slabs;
  DEVICE const int* layouts;
  DEVICE const int* tables;
  DEVICE const int* params;

  uint parameter(Parameter at) const THREAD { return uint(params[at]); }

  // A row of the tables.
  DEVICE const int* row(uint number) const THREAD {
    return tables + number * parameter(TABLE_STRIDE);
  }

  // Keys, or values, of `dim` numbers.
  Slots slots(uint entry, uint head, uint dim, bool values) const THREAD {
    uint stride = parameter(SLAB_STRIDE), slab = entry / stride;
    DEVICE const int* layout = layouts + slab * LAYOUT_FIELDS;
    DEVICE const ushort* page = slabs.memory[slab] + (entry - slab * stride) * ulong(layout[0]);
    uint format = uint(layout[values ? 5 : 4]);
    uint numbers_at = values ? uint(layout[2]) : 0, scales_at = uint(layout[values ? 3 : 1]);
    uint first = head * PAGE_SIZE;
#ifdef HAS_Q5
    uint centres_at = values ? 0 : uint(layout[6]);
#endif
    return {page + numbers_at + first * slot_words(format, dim),
            page + scales_at + first * scale_words(format, dim),
#ifdef HAS_Q5
            centres_at ? page + centres_at + head * dim : nullptr,
#endif
            format};
  }
};

// The first position that a query sees in its sequence's own pages, all those that no group reads.
uint first_seen(DEVICE const int* row, uint position, uint window) {
  uint first = window && position >= window ? position - window + 1 : 0;
#ifdef AFTER_PREFIX
  first = larger(first, uint(row[PREFIX_TOKENS]));
#endif
  return first;
}

// Which of a step's tokens are not padding, and the position of the first of them.
struct Own {
  uint begin, end, position;
};

Own own_tokens(DEVICE const int* row, uint steps) {
  int padding = row[1], length = row[0], end = int(steps) - padding;
  int begin = int(steps) - length - padding;
  if (begin < 0) begin = 0;
  if (end < begin) end = begin;
  return {uint(begin), uint(end), uint(length - (end - begin))};
}
