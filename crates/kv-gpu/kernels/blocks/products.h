// Products of a block's 32 values with activations, and the matrices of a launch.
#ifndef CELLAR_PRODUCTS
#define CELLAR_PRODUCTS

// 32 activations as `quantize_int8` writes them: d q, with the sums of both halves of q.
struct Int8Block {
  Quad lo, hi;
  float d;
  int sum0, sum1;
};
FN Int8Block int8_block(DEV const uint8_t *x, DEV const uint8_t *scales, uint64_t i) {
  Int8Block b;
  b.lo = quad_at(x, 2 * i);
  b.hi = quad_at(x, 2 * i + 1);
  uint64_t both = ((DEV const uint64_t *)scales)[i];
  uint32_t sums = uint32_t(both >> 32);
  b.d = bits_float(uint32_t(both));
  b.sum0 = int(int16_t(sums));
  b.sum1 = int(int16_t(sums >> 16));
  return b;
}

// The product of 32 values, where format F says how many scales a block has, and whether addends.
template <class F> FN float dot_int8(OWN const Block &w, OWN const Int8Block &x) {
  int first = dot4(w.q[0], int(x.lo.x), 0), second = 0;
  first = dot4(w.q[1], int(x.lo.y), first);
  first = dot4(w.q[2], int(x.lo.z), first);
  first = dot4(w.q[3], int(x.lo.w), first);
  if (F::halves == 1) second = first;
  second = dot4(w.q[4], int(x.hi.x), second);
  second = dot4(w.q[5], int(x.hi.y), second);
  second = dot4(w.q[6], int(x.hi.z), second);
  second = dot4(w.q[7], int(x.hi.w), second);
  if (F::halves == 1) {
    float sum = w.d[0] * float(second);
    if (F::has_m) sum = fma_f(w.m[0], float(x.sum0 + x.sum1), sum);
    return sum * x.d;
  }
  float sum = fma_f(w.d[1], float(second), w.d[0] * float(first));
  if (F::has_m) sum = fma_f(w.m[1], float(x.sum1), fma_f(w.m[0], float(x.sum0), sum));
  return sum * x.d;
}

// A matrix of up to three that a launch multiplies with the same activations.
struct GemvMatrix {
  uint32_t n_rows, plane1, plane2, plane3, has_bias;
};
// `split` warps (1, 2 or 4) share a row. With slots, a launch multiplies each slot's activations
// with the matrix of its expert; a token's slots share its activations or have their own.
struct GemvArgs {
  uint32_t format, n_columns, n_tokens, split, n_slots, x_by_slot, n_x;
  GemvMatrix m0, m1, m2;
};

// What a thread block computes: `n_rows` rows from `first_row` on, for up to T tokens.
struct GemvJob {
  Planes w;
  DEV const float *bias;
  DEV float *y;
  uint32_t n_rows, first_row, has_bias, x_row, n_tokens;
  uint64_t w_row; // the matrix's first row: experts' matrices follow each other
};

#define GEMV_PARAMETERS                                                                             \
  IN(0, uint8_t, w0), IN(1, uint8_t, w1), IN(2, uint8_t, w2), IN(3, uint8_t, x), IN(4, float, b0),    \
      IN(5, float, b1), IN(6, float, b2), IN(7, uint32_t, slots), OUT(8, float, y0), OUT(9, float, y1), \
      OUT(10, float, y2), ARGS(11, GemvArgs, a)

// The job of block (x, y), where a block has `n_block_rows` rows and T tokens. Where a slot has no
// expert, the job has no tokens.
#define GEMV_JOB(job, n_block_rows, T)                                                              \
  GemvJob job;                                                                                      \
  {                                                                                                 \
    uint32_t at = GROUP_X, n = (n_block_rows), n0 = (a.m0.n_rows + n - 1) / n;                       \
    uint32_t n1 = (a.m1.n_rows + n - 1) / n;                                                         \
    uint32_t which = at < n0 ? 0 : at < n0 + n1 ? 1 : 2, first = GROUP_Y * T;                         \
    GemvMatrix m = which == 0 ? a.m0 : which == 1 ? a.m1 : a.m2;                                     \
    job.w = planes(which == 0 ? w0 : which == 1 ? w1 : w2, m.plane1, m.plane2, m.plane3);            \
    job.bias = which == 0 ? b0 : which == 1 ? b1 : b2;                                               \
    job.y = (which == 0 ? y0 : which == 1 ? y1 : y2) + uint64_t(first) * m.n_rows;                    \
    job.n_rows = m.n_rows;                                                                           \
    job.has_bias = m.has_bias;                                                                       \
    job.first_row = (which == 0 ? at : which == 1 ? at - n0 : at - n0 - n1) * n;                     \
    job.w_row = 0;                                                                                   \
    job.x_row = first;                                                                               \
    job.n_tokens = a.n_tokens - first < T ? a.n_tokens - first : T;                                   \
    if (a.n_slots) {                                                                                 \
      uint32_t expert = slots[first];                                                                \
      job.n_tokens = expert == ~0u ? 0 : 1;                                                           \
      job.w_row = uint64_t(expert == ~0u ? 0 : expert) * m.n_rows;                                    \
      job.bias += job.w_row;                                                                          \
      if (!a.x_by_slot) job.x_row = first / a.n_slots;                                               \
    }                                                                                                \
  }

// Adds up what `split` warps have of each of a block's rows and tokens, and writes it with the bias.
// `partial` has T R floats a warp, row after row of a token.
template <uint32_t R, uint32_t T>
FN void gemv_write(OWN const GemvJob &job, TG const float *partial, uint32_t split, uint32_t tid) {
  if (tid >= 4 / split * R * T) return;
  uint32_t group = tid / (R * T), i = tid % (R * T), t = i / R, row = job.first_row + group * R + i % R;
  if (row >= job.n_rows || t >= (job.n_tokens ? job.n_tokens : 1)) return;
  float sum = 0.0f;
  for (uint32_t p = 0; p < split; ++p) sum += partial[(group * split + p) * R * T + i];
  if (job.n_tokens && job.has_bias) sum += job.bias[row];
  job.y[uint64_t(t) * job.n_rows + row] = sum;
}

// A kernel with R rows a warp and T tokens; SUMS adds up what a lane has of them.
#define GEMV(name, R, T, SUMS)                                                                      \
  KERNEL(name, 128, GEMV_PARAMETERS) {                                                              \
    SHARED(float, partial, 4 * R * T);                                                              \
    GEMV_JOB(job, 4 / a.split * R, T)                                                               \
    float sums[R * T];                                                                              \
    UNROLL                                                                                          \
    for (uint32_t i = 0; i < R * T; ++i) sums[i] = 0.0f;                                            \
    uint32_t part = WARP % a.split, row = job.first_row + WARP / a.split * R;                        \
    if (job.n_tokens) SUMS(job, a, x, row, part * 32 + LANE, a.split * 32, sums);                    \
    UNROLL                                                                                          \
    for (uint32_t i = 0; i < R * T; ++i) {                                                          \
      float sum = warp_sum(sums[i]);                                                                \
      if (LANE == 0) partial[WARP * (R * T) + i] = sum;                                             \
    }                                                                                               \
    sync_group();                                                                                   \
    gemv_write<R, T>(job, partial, a.split, TID);                                                   \
  }
#endif
