// Metal's words for the simulator: the kernels as dialect/metal.h writes them, run as C++ on fibers.
// Stands in for Metal's library, which it does not check: check-metal does, and the address spaces.
//
// Attributes are for Metal alone, compilers of C++ ignore them. A kernel's last four parameters, its
// place in grid and group, come from the block under way.
#ifndef CELLAR_SIM_METAL
#define CELLAR_SIM_METAL
#include "fibers.h"
#define device
#define constant const
#define threadgroup
#define thread
#define kernel static
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;
struct uint3 {
  uint x, y, z;
};
struct ulong2 {
  ulong x, y;
  ulong2(ulong both) : x(both), y(both) {}
};
struct atomic_uint {
  uint value;
};
enum memory_order { memory_order_relaxed };

namespace metal {
enum class mem_flags { mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
static inline void threadgroup_barrier(mem_flags) { sim::sync_group(); }
static inline void simdgroup_barrier(mem_flags) { sim::sync_warp(__LINE__); }
template <class T> static inline T simd_shuffle(T v, ushort lane) { return sim::exchange(v, lane, __LINE__); }
template <class T> static inline T simd_shuffle_xor(T v, ushort mask) {
  return sim::exchange(v, (sim::block->tid & 31u) ^ mask, __LINE__);
}
static inline float simd_max(float v) {
  float all[32];
  sim::gather(v, all, __LINE__);
  float most = all[0];
  for (float other : all) most = fmaxf(most, other);
  return most;
}
static inline bool simd_any(bool is) { return simd_max(is ? 1.0f : 0.0f) > 0.0f; }
static inline uint atomic_fetch_add_explicit(atomic_uint *at, uint v, memory_order) {
  uint before = at->value;
  at->value += v;
  return before;
}
struct half {
  uint16_t bits;
  explicit half(float f) : bits(sim::float_half(f)) {}
  half() = default;
  operator float() const { return sim::half_float(bits); }
};
struct half2 {
  half x, y;
};
static inline half2 fma(half2 a, half2 b, half2 c) {
  half2 d;
  d.x = half(float(a.x) * float(b.x) + float(c.x));
  d.y = half(float(a.y) * float(b.y) + float(c.y));
  return d;
}
// As in Metal 3.1.
#define __HAVE_BFLOAT__ 1
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
};
template <class To, class From> static inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type changes no size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// A lane has two of a matrix's 64 values, by columns: which ones Metal does not say, and PTX has others.
// `from` is the same in all lanes where they do the same with it.
template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "matrices are 8 times 8");
  T values[2];
  uint32_t from;
  simdgroup_matrix() { memset(this, 0xff, sizeof *this); }
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
static inline uint matrix_value(uint i) { return (sim::block->tid & 31u) + 32 * i; }
// Where value i of this lane is, from the first of a matrix in memory on.
static inline ulong matrix_offset(uint i, ulong elements_per_row, ulong2 origin, bool transpose) {
  uint row = matrix_value(i) % 8, column = matrix_value(i) / 8;
  if (origin.x || origin.y) sim::fail("the simulator knows no origin but 0");
  return transpose ? column * elements_per_row + row : row * elements_per_row + column;
}
template <class T, int C, int R> static inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> d;
  d.values[0] = d.values[1] = value;
  d.from = 0;
  return d;
}
// No lane waits for others here: what they have not written yet is not loaded.
template <class T>
static inline void simdgroup_load(simdgroup_matrix<T, 8, 8> &d, const T *src, ulong elements_per_row = 8,
                                  ulong2 origin = 0, bool transpose = false) {
  for (uint i = 0; i < 2; ++i) d.values[i] = src[matrix_offset(i, elements_per_row, origin, transpose)];
  d.from = uint32_t(uintptr_t(src)) * 31 + uint32_t(elements_per_row) * 2 + transpose;
}
template <class T>
static inline void simdgroup_store(simdgroup_matrix<T, 8, 8> a, T *dst, ulong elements_per_row = 8,
                                   ulong2 origin = 0, bool transpose = false) {
  for (uint i = 0; i < 2; ++i) dst[matrix_offset(i, elements_per_row, origin, transpose)] = a.values[i];
}
// d = a b + c
template <class D, class A, class B>
static inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, simdgroup_matrix<A, 8, 8> &a,
                                                 simdgroup_matrix<B, 8, 8> &b, simdgroup_matrix<D, 8, 8> &c) {
  struct Values {
    A a[2];
    B b[2];
    uint32_t from;
  };
  Values mine, all[32];
  memcpy(mine.a, a.values, sizeof mine.a);
  memcpy(mine.b, b.values, sizeof mine.b);
  mine.from = a.from * 31 + b.from;
  sim::gather(mine, all, __LINE__);
  for (const Values &lane : all)
    if (lane.from != mine.from) sim::fail("lanes of a SIMD group multiply different matrices");
  for (uint i = 0; i < 2; ++i) {
    uint row = matrix_value(i) % 8, column = matrix_value(i) / 8;
    D sum = c.values[i];
    for (uint k = 0; k < 8; ++k) {
      uint x = row + 8 * k, y = k + 8 * column;
      sum += float(all[x % 32].a[x / 32]) * float(all[y % 32].b[y / 32]);
    }
    d.values[i] = sum;
  }
}
#ifndef _LIBCPP_VERSION // its math.h has these for floats
static inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
static inline float fmax(float a, float b) { return fmaxf(a, b); }
static inline float fmin(float a, float b) { return fminf(a, b); }
static inline float fabs(float a) { return fabsf(a); }
static inline float sqrt(float a) { return sqrtf(a); }
static inline float exp(float a) { return expf(a); }
static inline float exp2(float a) { return exp2f(a); }
static inline float log(float a) { return logf(a); }
static inline float tanh(float a) { return tanhf(a); }
static inline float rint(float a) { return rintf(a); }
static inline float trunc(float a) { return truncf(a); }
#endif
} // namespace metal

namespace sim {

// A kernel as Metal, by the line of TABLE that names it.
struct RegisteredMetal {
  Kernel entry;
  template <class... P> RegisteredMetal(const char *name, const char *file, uint32_t threads, void (*raw)(P...)) {
    constexpr uint32_t n = sizeof...(P) - 4;
    static_assert(n <= 31, "Metal has 31 buffers");
    entry = {name, file, threads, n, {}, {}, (void (*)())raw, &RegisteredMetal::call<P...>, metal_kernels};
    uint32_t sizes[] = {uint32_t(sizeof(P))...};
    bool pointers[] = {is_pointer<P>...};
    for (uint32_t i = 0; i < n; ++i) {
      entry.sizes[i] = sizes[i];
      entry.pointers[i] = pointers[i];
    }
    metal_kernels = &entry;
  }
  template <class... P> static void call(void (*raw)(), void *const *args) {
    uint3 group = {block->x, block->y, 0};
    uint tid = block->tid, lane = tid & 31u, warp = tid >> 5;
    void *all[32];
    for (uint32_t i = 0; i + 4 < sizeof...(P); ++i) all[i] = args[i];
    void *places[] = {&group, &tid, &lane, &warp};
    memcpy(all + sizeof...(P) - 4, places, sizeof places);
    call_each((void (*)(P...))raw, all, std::index_sequence_for<P...>());
  }
  template <class... P, size_t... I>
  static void call_each(void (*raw)(P...), void *const *args, std::index_sequence<I...>) {
    raw(*(typename std::remove_const<typename std::remove_reference<P>::type>::type *)args[I]...);
  }
};

} // namespace sim

// Its own shared memory is an array of the group's, here of the block's.
#include "../dialect/metal.h"
#undef SHARED
#define SHARED(T, x, n) T *x = (T *)sim::shared(__COUNTER__, sizeof(T) * (n), SHARED_KIB << 10)
#endif
