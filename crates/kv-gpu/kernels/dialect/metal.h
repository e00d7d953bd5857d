// The dialect of the kernels as Metal Shading Language, to be compiled without fast math. It has been
// type-checked (check-metal), never run.
#ifndef CELLAR_DIALECT
#define CELLAR_DIALECT
#include <metal_stdlib>
using namespace metal;
#define SHARED_KIB 32
#define DEV device
#define TG threadgroup
#define OWN thread
#define FN inline
#define IN(n, T, x) device const T *x [[buffer(n)]]
#define OUT(n, T, x) device T *x [[buffer(n)]]
#define INOUT(n, T, x) device T *x [[buffer(n)]]
#define ARGS(n, T, x) constant T &x [[buffer(n)]]
#define KERNEL(name, threads, ...)                                                                  \
  [[max_total_threads_per_threadgroup(threads)]] kernel void name(                                  \
      __VA_ARGS__, uint3 kv_group [[threadgroup_position_in_grid]],                                 \
      uint TID [[thread_index_in_threadgroup]], uint LANE [[thread_index_in_simdgroup]],            \
      uint WARP [[simdgroup_index_in_threadgroup]])
#define SHARED(T, x, n) alignas(16) threadgroup T x[n]
#define TABLE(T, x, n) constant T x[n]
#define GROUP_X (kv_group.x)
#define GROUP_Y (kv_group.y)
#define UNROLL _Pragma("clang loop unroll(full)")
#define NO_UNROLL _Pragma("clang loop unroll(disable)")

struct alignas(16) Quad {
  uint32_t x, y, z, w;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};

// Threads.
FN void sync_group() { threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); }
FN void sync_warp() { simdgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); }
template <class T> FN T warp_xor(T v, uint32_t mask) { return simd_shuffle_xor(v, ushort(mask)); }
template <class T> FN T warp_from(T v, uint32_t lane) { return simd_shuffle(v, ushort(lane)); }
// Added up in the order of the CUDA dialect.
FN float warp_sum(float v) {
  for (uint32_t o = 16; o; o >>= 1) v += warp_xor(v, o);
  return v;
}
FN float warp_max(float v) { return simd_max(v); }
FN bool warp_any(bool is) { return simd_any(is); }
FN uint32_t atomic_add_shared(TG uint32_t *at, uint32_t v) {
  return atomic_fetch_add_explicit((TG atomic_uint *)at, v, memory_order_relaxed);
}

// Numbers.
FN float bits_float(uint32_t u) { return as_type<float>(u); }
FN uint32_t float_bits(float f) { return as_type<uint32_t>(f); }
FN float half_float(uint16_t u) { return float(as_type<half>(u)); }
FN uint16_t float_half(float f) { return as_type<uint16_t>(half(f)); }
FN uint32_t pack_halves(float low, float high) { return uint32_t(float_half(high)) << 16 | float_half(low); }
FN uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  return as_type<uint32_t>(fma(as_type<half2>(a), as_type<half2>(b), as_type<half2>(c)));
}
FN int dot4(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += int(int8_t(uint32_t(a) >> i)) * int(int8_t(uint32_t(b) >> i));
  return c;
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
FN float tanh_f(float a) { return tanh(a); }
FN float rint_f(float a) { return rint(a); }
FN float trunc_f(float a) { return trunc(a); }
// Metal has neither of these.
FN float log1p_f(float a) {
  float u = 1.0f + a;
  return u == 1.0f ? a : log(u) * (a / (u - 1.0f));
}
// Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most.
FN float erf_f(float a) {
  float x = fabs(a), t = 1.0f / fma(0.3275911f, x, 1.0f);
  float sum = fma(t, fma(t, fma(t, fma(t, 1.061405429f, -1.453152027f), 1.421413741f), -0.284496736f), 0.254829592f);
  float y = 1.0f - sum * t * exp(-x * x);
  return a < 0.0f ? -y : y;
}

// Metal has no asynchronous copies of this kind: bytes arrive at once.
FN void copy_async16(TG Quad *to, DEV const uint8_t *from) { *to = *(DEV const Quad *)from; }
FN void copy_commit() {}
template <int n> FN void copy_wait() {}

// Matrices of 8 times 8 of a SIMD group. Which lane has which of their values is not specified, so what a
// lane sets or gets of them goes through shared memory: 512 bytes a warp. Metal's library declares products
// of matrices of any two floating types with sums in a third, its specification those of one type.
// Weights of BF16 are multiplied as they are where the language has it (Metal 3.1), else as halves.
#define FRAG_MEMORY(x, n_warps)                                                                     \
  SHARED(float, x##_of_warps, 128 * (n_warps));                                                     \
  TG float *x = x##_of_warps + WARP * 128
struct Half {
  typedef half value;
};
#ifdef __HAVE_BFLOAT__
struct Bfloat {
  typedef bfloat value;
};
typedef Bfloat MatrixOfBf16;
#else
struct Bfloat {};
typedef Half MatrixOfBf16;
#endif
struct FragA {
  simdgroup_half8x8 m[4]; // columns 0 to 7 of rows 0 to 7 and 8 to 15, then columns 8 to 15
};
template <class T> struct FragB {
  simdgroup_matrix<typename T::value, 8, 8> m[2]; // 8 of the values that are multiplied, times 8 rows of B
};
struct FragD {
  simdgroup_float8x8 m[2];
};
FN uint32_t frag_row(uint32_t lane, uint32_t i) { return lane / 4 + i / 2 * 8; }
FN uint32_t frag_column(uint32_t lane, uint32_t i) { return lane % 4 * 2 + i % 2; }
FN void frag_sync() { simdgroup_barrier(mem_flags::mem_threadgroup); }
FN void frag_zero(OWN FragD &d) {
  UNROLL for (uint32_t i = 0; i < 2; ++i) d.m[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
FN void frag_values(OWN FragD &d, TG float *memory, uint32_t lane, OWN float *v) {
  UNROLL for (uint32_t i = 0; i < 2; ++i) simdgroup_store(d.m[i], memory + 64 * i, 8);
  frag_sync();
  UNROLL for (uint32_t i = 0; i < 4; ++i) v[i] = memory[frag_row(lane, i) * 8 + frag_column(lane, i)];
  frag_sync();
}
FN void frag_load_a(OWN FragA &a, TG const Quad *rows, uint32_t stride, uint32_t) {
  UNROLL for (uint32_t i = 0; i < 4; ++i)
    simdgroup_load(a.m[i], (TG const half *)(rows + i % 2 * 8 * stride + i / 2), stride * 8);
}
template <class T> FN void frag_load_b(OWN FragB<T> &b, TG const Quad *rows, uint32_t stride, uint32_t) {
  UNROLL for (uint32_t i = 0; i < 2; ++i)
    simdgroup_load(b.m[i], (TG const typename T::value *)(rows + i), stride * 8, ulong2(0), true);
}
template <class T>
FN void frag_load_two(OWN FragB<T> &b, OWN FragB<T> &next, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  frag_load_b(b, rows, stride, lane);
  frag_load_b(next, rows + 8 * stride, stride, lane);
}
FN void frag_b_columns(OWN FragB<Half> &b, OWN FragB<Half> &next, TG const Quad *rows, uint32_t stride, uint32_t) {
  UNROLL for (uint32_t i = 0; i < 2; ++i) {
    simdgroup_load(b.m[i], (TG const half *)(rows + i * 8 * stride), stride * 8);
    simdgroup_load(next.m[i], (TG const half *)(rows + i * 8 * stride + 1), stride * 8);
  }
}
FN void frag_set_a(OWN FragA &a, TG float *memory, uint32_t lane, OWN const uint32_t *pairs) {
  UNROLL for (uint32_t i = 0; i < 4; ++i)
    ((TG uint32_t *)memory)[(lane / 4 + i % 2 * 8) * 8 + i / 2 * 4 + lane % 4] = pairs[i];
  frag_sync();
  frag_load_a(a, (TG const Quad *)memory, 2, lane);
  frag_sync();
}
// Only where a factor is not 1: that changes nothing.
template <uint32_t n> FN void frag_scale_rows(OWN FragD *d, TG float *memory, uint32_t lane, OWN const float *factors) {
  if (simd_max(factors[0] != 1.0f || factors[1] != 1.0f ? 1.0f : 0.0f) == 0.0f) return;
  UNROLL for (uint32_t f = 0; f < n; ++f) {
    float v[4];
    frag_values(d[f], memory, lane, v);
    UNROLL for (uint32_t i = 0; i < 4; ++i)
      memory[frag_row(lane, i) * 8 + frag_column(lane, i)] = v[i] * factors[i / 2];
    frag_sync();
    UNROLL for (uint32_t i = 0; i < 2; ++i) simdgroup_load(d[f].m[i], memory + 64 * i, 8);
    frag_sync();
  }
}
template <class T> FN void frag_mma(OWN FragD &d, OWN FragA &a, OWN FragB<T> &b) {
  UNROLL for (uint32_t k = 0; k < 2; ++k)
    UNROLL for (uint32_t i = 0; i < 2; ++i)
      simdgroup_multiply_accumulate(d.m[i], a.m[2 * k + i], b.m[k], d.m[i]);
}
#endif
