// The dialect of the kernels as C++ for OpenCL 2021. Its words are described in kernels/README.md.
//
// A warp is a subgroup of 32 work items, which are neighbours in a work group: SUBGROUP, which a device
// defines, asks for that size where it can be asked for.
#ifndef CELLAR_DIALECT
#define CELLAR_DIALECT
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL FP_CONTRACT OFF
typedef uchar uint8_t;
typedef char int8_t;
typedef ushort uint16_t;
typedef short int16_t;
typedef uint uint32_t;
typedef int int32_t;
typedef ulong uint64_t;
#define SHARED_KIB 32
#define DEV __global
#define TG __local
#define OWN __private
#define FN static inline
#define IN(n, T, x) __global const T *x
#define OUT(n, T, x) __global T *x
#define INOUT(n, T, x) __global T *x
#define ARGS(n, T, x) const T x
#ifndef SUBGROUP
#define SUBGROUP
#endif
#define KERNEL(name, threads, ...)                                                                  \
  __kernel __attribute__((reqd_work_group_size(threads, 1, 1))) SUBGROUP void name(__VA_ARGS__)
#define SHARED(T, x, n) __local T x[n] __attribute__((aligned(16)))
#define TABLE(T, x, n) __constant T x[n]
#define TID ((uint32_t)get_local_id(0))
#define LANE ((uint32_t)get_sub_group_local_id())
#define WARP ((uint32_t)get_sub_group_id())
#define GROUP_X ((uint32_t)get_group_id(0))
#define GROUP_Y ((uint32_t)get_group_id(1))
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("nounroll")

struct __attribute__((aligned(16))) Quad {
  uint32_t x, y, z, w;
};
struct __attribute__((aligned(16))) Float4 {
  float x, y, z, w;
};

// Threads.
FN void sync_group() { barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE); }
FN void sync_warp() { sub_group_barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE); }
template <class T> FN T warp_xor(T v, uint32_t mask) { return sub_group_shuffle_xor(v, mask); }
template <class T> FN T warp_from(T v, uint32_t lane) { return sub_group_shuffle(v, lane); }
// Added up in the order of the CUDA dialect.
FN float warp_sum(float v) {
  for (uint32_t o = 16; o; o >>= 1) v += warp_xor(v, o);
  return v;
}
FN float warp_max(float v) {
  for (uint32_t o = 16; o; o >>= 1) v = fmax(v, warp_xor(v, o));
  return v;
}
FN bool warp_any(bool is) { return sub_group_any(is) != 0; }
FN uint32_t atomic_add_shared(TG uint32_t *at, uint32_t v) { return atomic_add((volatile TG uint32_t *)at, v); }

// Numbers.
FN float bits_float(uint32_t u) { return as_float(u); }
FN uint32_t float_bits(float f) { return as_uint(f); }
FN float half_float(uint16_t u) { return float(as_half(u)); }
FN uint16_t float_half(float f) { return as_ushort(half(f)); }
FN uint32_t pack_halves(float low, float high) { return uint32_t(float_half(high)) << 16 | float_half(low); }
FN uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) { return as_uint(fma(as_half2(a), as_half2(b), as_half2(c))); }
FN int dot4(int a, int b, int c) {
#ifdef __opencl_c_integer_dot_product_input_4x8bit_packed
  return c + dot_4x8packed_ss_int(uint32_t(a), uint32_t(b));
#else
  for (int i = 0; i < 32; i += 8) c += int(int8_t(uint32_t(a) >> i)) * int(int8_t(uint32_t(b) >> i));
  return c;
#endif
}
FN uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t r = 0;
  for (uint32_t i = 0; i < 4; ++i) r |= uint32_t(bytes >> (select >> 4 * i & 7) * 8 & 255) << 8 * i;
  return r;
}
FN float fma_f(float a, float b, float c) { return fma(a, b, c); }
FN float max_f(float a, float b) { return fmax(a, b); }
FN float min_f(float a, float b) { return fmin(a, b); }
FN float abs_f(float a) { return fabs(a); }
FN float sqrt_f(float a) { return sqrt(a); }
FN float exp_f(float a) { return exp(a); }
FN float exp2_f(float a) { return exp2(a); }
FN float log_f(float a) { return log(a); }
FN float log1p_f(float a) { return log1p(a); }
FN float tanh_f(float a) { return tanh(a); }
FN float erf_f(float a) { return erf(a); }
FN float rint_f(float a) { return rint(a); }
FN float trunc_f(float a) { return trunc(a); }

// Bytes arrive at once.
FN void copy_async16(TG Quad *to, DEV const uint8_t *from) { *to = *(DEV const Quad *)from; }
FN void copy_commit() {}
template <int n> FN void copy_wait() {}

// Fragments as PTX has them, multiplied through exchanges: see the CUDA dialect.
#define FRAG_MEMORY(x, n_warps) TG float *x = 0
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
FN void frag_mma(OWN FragD &d, OWN const FragA &a, OWN const FragB<Half> &b) {
  uint32_t lane = LANE, row = lane / 4 * 4, column = lane % 4 * 8;
  UNROLL for (uint32_t pair = 0; pair < 4; ++pair) {
    uint32_t x[4], y[2][2];
    UNROLL for (uint32_t i = 0; i < 4; ++i) x[i] = warp_from(a.r[i], row + pair);
    UNROLL for (uint32_t i = 0; i < 4; ++i) y[i / 2][i % 2] = warp_from(b.r[i % 2], column + i / 2 * 4 + pair);
    UNROLL for (uint32_t i = 0; i < 4; ++i) UNROLL for (uint32_t k = 0; k < 4; ++k) {
      uint32_t shift = k % 2 * 16, u = x[i / 2 + k / 2 * 2] >> shift, v = y[i % 2][k / 2] >> shift;
      d.r[i] = fma(half_float(uint16_t(u)), half_float(uint16_t(v)), d.r[i]);
    }
  }
}
FN void frag_b_columns(OWN FragB<Half> &b, OWN FragB<Half> &next, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  TG const uint16_t *at = (TG const uint16_t *)rows + lane % 4 * 2 * stride * 8 + lane / 4;
  UNROLL for (uint32_t i = 0; i < 4; ++i) {
    TG const uint16_t *low = at + i % 2 * 64 * stride + i / 2 * 8;
    uint32_t both = uint32_t(low[8 * stride]) << 16 | low[0];
    if (i < 2)
      b.r[i % 2] = both;
    else
      next.r[i % 2] = both;
  }
}
#endif
