// The largest values of a list by one block of threads: by radix, 8 bits at a time, of the value (its
// bits in an order of their own), then, of equal values, of the column. And the ranks of flags.
#define SELECT_THREADS 256

// Rises with the value; 0 is below all.
FN uint32_t sortable(float x) {
  uint32_t u = float_bits(x);
  return u >> 31 ? ~u : u | 0x80000000u;
}

// Rises as the column falls, in 24 bits.
FN uint32_t falling(uint32_t column) { return ~column & 0xffffffu; }

// The sum of a value over the lanes up to this one.
FN uint32_t warp_prefix_sum(uint32_t v, uint32_t lane) {
  for (uint32_t o = 1; o < 32; o *= 2) {
    uint32_t before = warp_from(v, (lane - o) & 31u);
    if (lane >= o) v += before;
  }
  return v;
}

// Finds in `counts` the digit at which, from the largest down, `wanted` is reached: into found[0],
// what is still wanted of it into found[1], and how many there are of it into found[2]. By one warp.
FN void find_digit(TG const uint32_t *counts, TG uint32_t *found, uint32_t wanted, uint32_t lane) {
  uint32_t top = 255 - lane * 8, own = 0;
  for (uint32_t i = 0; i < 8; ++i) own += counts[top - i];
  uint32_t above = warp_prefix_sum(own, lane) - own;
  if (above < wanted && above + own >= wanted) {
    uint32_t d = top;
    while (above + counts[d] < wanted) above += counts[d--];
    found[0] = d;
    found[1] = wanted - above;
    found[2] = counts[d];
  }
}

// Selects the `wanted` largest of n pairs of key and column: `limit[0]` is the least key that is
// taken, and of those equal to it the ones whose falling column is at least `limit[1]`.
#define SELECT(n, KEY, COLUMN, wanted)                                                              \
  uint32_t key_limit = 0, column_limit = 0, left = wanted;                                          \
  for (uint32_t pass = 0; pass < 7; ++pass) {                                                       \
    bool of_key = pass < 4;                                                                         \
    uint32_t shift = of_key ? 24 - 8 * pass : 16 - 8 * (pass - 4);                                  \
    counts[TID] = 0;                                                                                \
    sync_group();                                                                                   \
    for (uint32_t i = TID; i < n; i += SELECT_THREADS) {                                               \
      uint32_t key = KEY, low = of_key ? key : falling(COLUMN);                                     \
      uint32_t limit = of_key ? key_limit : column_limit;                                           \
      bool in = of_key || key == key_limit;                                                         \
      if (in && (low ^ limit) >> shift >> 8 == 0) atomic_add_shared(counts + (low >> shift & 255), 1); \
    }                                                                                               \
    sync_group();                                                                                   \
    if (WARP == 0) find_digit(counts, found, left, LANE);                                           \
    sync_group();                                                                                   \
    if (of_key)                                                                                     \
      key_limit |= found[0] << shift;                                                               \
    else                                                                                            \
      column_limit |= found[0] << shift;                                                            \
    left = found[1];                                                                                \
    if (pass == 3 && left == found[2]) break;                                                       \
  }                                                                                                 \
  if (TID == 0) counts[0] = 0;                                                                      \
  sync_group();

#define IS_SELECTED(key, column) (key > key_limit || (key == key_limit && falling(column) >= column_limit))

// How many threads of the block up to this one have a flag, after `before` others, whose number grows
// by all of the block's. `counts` is shared memory for 8 values.
FN uint32_t block_rank(uint32_t flag, TG uint32_t *counts, OWN uint32_t &before, uint32_t tid) {
  uint32_t rank = warp_prefix_sum(flag, tid % 32);
  if (tid % 32 == 31) counts[tid / 32] = rank;
  sync_group();
  rank += before;
  for (uint32_t w = 0; w < SELECT_THREADS / 32; ++w) {
    if (w < tid / 32) rank += counts[w];
    before += counts[w];
  }
  sync_group();
  return rank;
}
