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
FN uint32_t atomic_add_shared(TG uint32_t *at, uint32_t v) {
  return atomic_fetch_add_explicit((TG atomic_uint *)at, v, memory_order_relaxed);
}

// Numbers.
FN float bits_float(uint32_t u) { return as_type<float>(u); }
FN uint32_t float_bits(float f) { return as_type<uint32_t>(f); }
FN float half_float(uint16_t u) { return float(as_type<half>(u)); }
FN uint16_t float_half(float f) { return as_type<uint16_t>(half(f)); }
FN uint32_t pack_halves(float low, float high) { return uint32_t(float_half(high)) << 16 | float_half(low); }
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

// The registers of PTX, for Metal does not say which lane has which values of its matrices.
struct FragA {
  uint32_t r[4];
};
struct FragB {
  uint32_t r[2];
};
struct FragD {
  float r[4];
};
FN uint32_t frag_lane() { return simd_prefix_exclusive_sum(1u); }
FN uint32_t frag_row(uint32_t lane, uint32_t i) { return lane / 4 + i / 2 * 8; }
FN uint32_t frag_column(uint32_t lane, uint32_t i) { return lane % 4 * 2 + i % 2; }
FN void frag_mma(OWN FragD &d, OWN const FragA &a, OWN const FragB &b) {
  uint32_t lane = frag_lane();
  UNROLL for (uint32_t k = 0; k < 8; ++k) {
    uint32_t x[2], y[2];
    UNROLL for (uint32_t i = 0; i < 2; ++i) {
      x[i] = warp_from(a.r[i + k / 4 * 2], lane / 4 * 4 + k % 4);
      y[i] = warp_from(b.r[k / 4], (lane % 4 * 2 + i) * 4 + k % 4);
    }
    UNROLL for (uint32_t i = 0; i < 4; ++i) {
      d.r[i] = fma(half_float(uint16_t(x[i / 2])), half_float(uint16_t(y[i % 2])), d.r[i]);
      d.r[i] = fma(half_float(uint16_t(x[i / 2] >> 16)), half_float(uint16_t(y[i % 2] >> 16)), d.r[i]);
    }
  }
}
FN void frag_b_columns(OWN FragB &b, OWN FragB &next, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  TG const uint16_t *at = (TG const uint16_t *)rows + lane % 4 * 2 * stride * 8 + lane / 4;
  UNROLL for (uint32_t i = 0; i < 2; ++i) {
    TG const uint16_t *low = at + i * 64 * stride;
    b.r[i] = uint32_t(low[8 * stride]) << 16 | low[0];
    next.r[i] = uint32_t(low[8 * stride + 8]) << 16 | low[8];
  }
}
#endif
