// The dialect of the kernels as CUDA C++ (nvcc, NVRTC). Its words are described in kernels/README.md.
#ifndef CELLAR_DIALECT
#define CELLAR_DIALECT
#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif
#define SHARED_KIB 48
#define DEV
#define TG
#define OWN
#define FN __device__ __forceinline__
#define IN(n, T, x) const T *__restrict__ x
#define OUT(n, T, x) T *__restrict__ x
#define INOUT(n, T, x) T *x
#define ARGS(n, T, x) const T x
#define KERNEL(name, threads, ...) extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
#define SHARED(T, x, n) __shared__ __align__(16) T x[n]
#define TABLE(T, x, n) static __device__ const T x[n]
#define TID (threadIdx.x)
#define LANE (threadIdx.x & 31u)
#define WARP (threadIdx.x >> 5)
#define GROUP_X (blockIdx.x)
#define GROUP_Y (blockIdx.y)
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

struct __align__(16) Quad {
  uint32_t x, y, z, w;
};
struct __align__(16) Float4 {
  float x, y, z, w;
};

// Threads.
FN void sync_group() { __syncthreads(); }
FN void sync_warp() { __syncwarp(); }
template <class T> FN T warp_xor(T v, uint32_t mask) { return __shfl_xor_sync(~0u, v, mask); }
template <class T> FN T warp_from(T v, uint32_t lane) { return __shfl_sync(~0u, v, lane); }
FN float warp_sum(float v) {
  for (uint32_t o = 16; o; o >>= 1) v += warp_xor(v, o);
  return v;
}
FN float warp_max(float v) {
  for (uint32_t o = 16; o; o >>= 1) v = fmaxf(v, warp_xor(v, o));
  return v;
}
FN bool warp_any(bool is) { return __any_sync(~0u, is); }
FN uint32_t atomic_add_shared(TG uint32_t *at, uint32_t v) { return atomicAdd(at, v); }

// Numbers.
FN float bits_float(uint32_t u) { return __uint_as_float(u); }
FN uint32_t float_bits(float f) { return __float_as_uint(f); }
FN float half_float(uint16_t u) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(u));
  return f;
}
FN uint16_t float_half(float f) {
  uint16_t u;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(u) : "f"(f));
  return u;
}
FN uint32_t pack_halves(float low, float high) {
  uint32_t u;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(high), "f"(low));
  return u;
}
// a b + c of two halves each.
FN uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t u;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(u) : "r"(a), "r"(b), "r"(c));
  return u;
}
FN int dot4(int a, int b, int c) { return __dp4a(a, b, c); }
FN uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t select) { return __byte_perm(a, b, select); }
FN float fma_f(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FN float max_f(float a, float b) { return fmaxf(a, b); }
FN float min_f(float a, float b) { return fminf(a, b); }
FN float abs_f(float a) { return fabsf(a); }
FN float sqrt_f(float a) { return __fsqrt_rn(a); }
FN float exp_f(float a) { return expf(a); }
// Off by two units in the last place at most, and 0 for what is no normal number.
FN float exp2_f(float a) {
  float f;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(f) : "f"(a));
  return f;
}
FN float log_f(float a) { return logf(a); }
FN float log1p_f(float a) { return log1pf(a); }
FN float tanh_f(float a) { return tanhf(a); }
FN float erf_f(float a) { return erff(a); }
FN float rint_f(float a) { return rintf(a); }
FN float trunc_f(float a) { return truncf(a); }

// 16 bytes from device memory to shared memory, complete at the wait that leaves at most n later
// groups under way; then a sync_group shows them to other threads.
FN void copy_async16(TG void *to, DEV const void *from) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
FN void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n> FN void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }

// Fragments, D[16, 8] += A[16, 16] B[8, 16]^T by one warp: halves in, floats out. What a lane sets and
// gets of them is in PTX's layout: of D's values those at frag_row and frag_column, of A's rows pairs of
// neighbours, row lane / 4 (and 8 further), columns 2 (lane % 4) (and 8 further). A lane's registers are
// just these, so FRAG_MEMORY is none. BF16 is multiplied as halves, too.
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
// Four matrices of 8 rows of 16 bytes each: lane i has the address of row i % 8 of matrix i / 8, and gets of
// matrix j, in r[j], row lane / 4's pair lane % 4.
FN void load_matrices(TG const Quad *row, OWN uint32_t &r0, OWN uint32_t &r1, OWN uint32_t &r2, OWN uint32_t &r3) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(at)
               : "memory");
}
FN void frag_load_a(OWN FragA &a, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  load_matrices(rows + lane % 16 * stride + lane / 16, a.r[0], a.r[1], a.r[2], a.r[3]);
}
template <class T>
FN void frag_load_two(OWN FragB<T> &b, OWN FragB<T> &next, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  load_matrices(rows + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2, b.r[0], b.r[1], next.r[0], next.r[1]);
}
FN void frag_mma(FragD &d, const FragA &a, const FragB<Half> &b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d.r[0]), "+f"(d.r[1]), "+f"(d.r[2]), "+f"(d.r[3])
               : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
}
// Two neighbouring B of 16 rows of shared memory, which are the 16 values that are multiplied: their
// first 16 columns. Rows begin `stride` units of 16 bytes apart.
FN void frag_b_columns(FragB<Half> &b, FragB<Half> &next, TG const Quad *rows, uint32_t stride, uint32_t lane) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(rows + lane % 16 * stride + lane / 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b.r[0]), "=r"(b.r[1]), "=r"(next.r[0]), "=r"(next.r[1])
               : "r"(at)
               : "memory");
}
#endif
