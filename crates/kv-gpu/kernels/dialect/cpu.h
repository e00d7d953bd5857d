// The dialect of the kernels as C++ that the simulator runs: a fiber for each thread.
#ifndef CELLAR_DIALECT
#define CELLAR_DIALECT
#include "../sim/fibers.h"
#define SHARED_KIB 48
#define DEV
#define TG
#define OWN
#define FN static inline
#define IN(n, T, x) const T *x
#define OUT(n, T, x) T *x
#define INOUT(n, T, x) T *x
#define ARGS(n, T, x) const T x
#define KERNEL(name, threads, ...)                                                                  \
  static void name(__VA_ARGS__);                                                                    \
  static const sim::Registered name##_registered(#name, __FILE__, threads, name);                               \
  static void name(__VA_ARGS__)
#define SHARED(T, x, n) T *x = (T *)sim::shared(__COUNTER__, sizeof(T) * (n))
#define TABLE(T, x, n) static const T x[n]
#define TID (sim::block->tid)
#define LANE (sim::block->tid & 31u)
#define WARP (sim::block->tid >> 5)
#define GROUP_X (sim::block->x)
#define GROUP_Y (sim::block->y)
#define UNROLL
#define NO_UNROLL

struct alignas(16) Quad {
  uint32_t x, y, z, w;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};

// Threads. `place` is the line of the call: all lanes of a warp must come to the same one.
FN void sync_group() { sim::sync_group(); }
FN void sync_warp(uint32_t place = __builtin_LINE()) { sim::sync_warp(place); }
template <class T> FN T warp_xor(T v, uint32_t mask, uint32_t place = __builtin_LINE()) {
  return sim::exchange(v, LANE ^ mask, place);
}
template <class T> FN T warp_from(T v, uint32_t lane, uint32_t place = __builtin_LINE()) { return sim::exchange(v, lane, place); }
// Added up in the order of the CUDA dialect, in one exchange.
FN float warp_sum(float v, uint32_t place = __builtin_LINE()) {
  float all[32];
  sim::gather(v, all, place);
  for (uint32_t o = 16; o; o >>= 1)
    for (uint32_t l = 0; l < o; ++l) all[l] = all[l] + all[l + o];
  return all[0];
}
FN float warp_max(float v, uint32_t place = __builtin_LINE()) {
  float all[32];
  sim::gather(v, all, place);
  float most = all[0];
  for (uint32_t l = 1; l < 32; ++l) most = fmaxf(most, all[l]);
  return most;
}
FN bool warp_any(bool is, uint32_t place = __builtin_LINE()) { return warp_max(is ? 1.0f : 0.0f, place) > 0.0f; }
FN uint32_t atomic_add_shared(TG uint32_t *at, uint32_t v) {
  uint32_t before = *at;
  *at += v;
  return before;
}

// Numbers.
FN float bits_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
FN uint32_t float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
FN float half_float(uint16_t u) { return sim::half_float(u); }
FN uint16_t float_half(float f) { return sim::float_half(f); }
FN uint32_t pack_halves(float low, float high) { return uint32_t(float_half(high)) << 16 | float_half(low); }
FN uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t u = 0;
  for (uint32_t i = 0; i < 32; i += 16) {
    float product = half_float(uint16_t(a >> i)) * half_float(uint16_t(b >> i));
    u |= uint32_t(float_half(product + half_float(uint16_t(c >> i)))) << i;
  }
  return u;
}
FN int dot4(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += int(int8_t(uint32_t(a) >> i)) * int(int8_t(uint32_t(b) >> i));
  return c;
}
// Four of the eight bytes of a and b, by the low three bits of the selector's nibbles.
FN uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (uint32_t i = 0; i < 4; ++i) r |= uint32_t(bytes >> (select >> 4 * i & 7) * 8 & 255) << 8 * i;
  return r;
}
FN float fma_f(float a, float b, float c) { return fmaf(a, b, c); }
FN float max_f(float a, float b) { return fmaxf(a, b); }
FN float min_f(float a, float b) { return fminf(a, b); }
FN float abs_f(float a) { return fabsf(a); }
FN float sqrt_f(float a) { return sqrtf(a); }
FN float exp_f(float a) { return expf(a); }
FN float exp2_f(float a) { return exp2f(a); }
FN float log_f(float a) { return logf(a); }
FN float log1p_f(float a) { return log1pf(a); }
FN float tanh_f(float a) { return tanhf(a); }
FN float erf_f(float a) { return erff(a); }
FN float rint_f(float a) { return rintf(a); }
FN float trunc_f(float a) { return truncf(a); }

// Bytes arrive at the wait, not before: a forgotten wait reads what was there.
FN void copy_async16(TG void *to, DEV const void *from) { sim::copy_async(to, from, 16); }
FN void copy_commit() { sim::copy_commit(); }
template <int n> FN void copy_wait() { sim::copy_wait(n); }

// Fragments as PTX has them: see the CUDA dialect.
#define FRAG_MEMORY(x, n_warps) TG float *x = nullptr
struct Half {};
struct Bfloat {};
typedef Half MatrixOfBf16;
struct FragA {
  uint32_t r[4];
};
template <class T> struct FragB {
  uint32_t r[2];
};
struct FragD {
  float r[4];
};
FN uint32_t frag_row(uint32_t lane, uint32_t i) { return lane / 4 + i / 2 * 8; }
FN uint32_t frag_column(uint32_t lane, uint32_t i) { return lane % 4 * 2 + i % 2; }
FN void frag_zero(OWN FragD &d) {
  UNROLL for (uint32_t i = 0; i < 4; ++i) d.r[i] = 0.0f;
}
FN void frag_values(OWN FragD &d, TG float *, uint32_t, OWN float *v) {
  UNROLL for (uint32_t i = 0; i < 4; ++i) v[i] = d.r[i];
}
FN void frag_set_a(OWN FragA &a, TG float *, uint32_t, OWN const uint32_t *pairs) {
  UNROLL for (uint32_t i = 0; i < 4; ++i) a.r[i] = pairs[i];
}
template <uint32_t n> FN void frag_scale_rows(OWN FragD *d, TG float *, uint32_t, OWN const float *factors) {
  UNROLL for (uint32_t i = 0; i < 4 * n; ++i) d[i / 4].r[i % 4] *= factors[i % 4 / 2];
}
FN void frag_load_a(OWN FragA &a, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  TG const uint32_t *at = (TG const uint32_t *)rows + lane / 4 * stride * 4 + lane % 4;
  UNROLL for (uint32_t i = 0; i < 4; ++i) a.r[i] = at[i % 2 * 32 * stride + i / 2 * 4];
}
template <class T> FN void frag_load_b(OWN FragB<T> &b, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  TG const uint32_t *at = (TG const uint32_t *)rows + lane / 4 * stride * 4 + lane % 4;
  UNROLL for (uint32_t i = 0; i < 2; ++i) b.r[i] = at[i * 4];
}
template <class T>
FN void frag_load_two(OWN FragB<T> &b, OWN FragB<T> &next, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  frag_load_b(b, rows, stride, lane);
  frag_load_b(next, rows + 8 * stride, stride, lane);
}
// In PTX's layout of registers: r[0] of A has columns 0 to 7 of rows 0 to 7, r[1] of rows 8 to 15,
// r[2] and r[3] the same of columns 8 to 15.
FN void frag_mma(FragD &d, const FragA &a, const FragB<Half> &b, uint32_t place = __builtin_LINE()) {
  FragA as[32];
  FragB<Half> bs[32];
  sim::gather(a, as, place);
  sim::gather(b, bs, place);
  uint32_t g = LANE / 4, t = LANE % 4;
  for (uint32_t i = 0; i < 4; ++i)
    for (uint32_t k = 0; k < 16; ++k) {
      uint32_t pair = k % 8 / 2, shift = k % 2 * 16;
      uint32_t x = as[g * 4 + pair].r[i / 2 + k / 8 * 2], y = bs[(t * 2 + i % 2) * 4 + pair].r[k / 8];
      d.r[i] += half_float(uint16_t(x >> shift)) * half_float(uint16_t(y >> shift));
    }
}
FN void frag_b_columns(FragB<Half> &b, FragB<Half> &next, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  const uint16_t *at = (const uint16_t *)rows + lane % 4 * 2 * stride * 8 + lane / 4;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint16_t *low = at + i % 2 * 64 * stride + i / 2 * 8;
    (i < 2 ? b : next).r[i % 2] = uint32_t(low[8 * stride]) << 16 | low[0];
  }
}
#endif
