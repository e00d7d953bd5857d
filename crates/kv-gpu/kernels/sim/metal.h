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
struct uint3 {
  uint x, y, z;
};
struct atomic_uint {
  uint value;
};
enum memory_order { memory_order_relaxed };

namespace metal {
enum class mem_flags { mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
static inline void threadgroup_barrier(mem_flags) { sim::sync_group(); }
static inline void simdgroup_barrier(mem_flags) { sim::sync_warp(); }
template <class T> static inline T simd_shuffle(T v, ushort lane) { return sim::exchange(v, lane); }
template <class T> static inline T simd_shuffle_xor(T v, ushort mask) {
  return sim::exchange(v, (sim::block->tid & 31u) ^ mask);
}
static inline float simd_max(float v) {
  float all[32];
  sim::gather(v, all);
  float most = all[0];
  for (float other : all) most = fmaxf(most, other);
  return most;
}
static inline uint simd_prefix_exclusive_sum(uint v) {
  uint all[32], sum = 0;
  sim::gather(v, all);
  for (uint lane = 0; lane < (sim::block->tid & 31u); ++lane) sum += all[lane];
  return sum;
}
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
template <class To, class From> static inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type changes no size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
static inline float fmax(float a, float b) { return fmaxf(a, b); }
static inline float fmin(float a, float b) { return fminf(a, b); }
static inline float fabs(float a) { return fabsf(a); }
static inline float sqrt(float a) { return sqrtf(a); }
static inline float exp(float a) { return expf(a); }
static inline float log(float a) { return logf(a); }
static inline float tanh(float a) { return tanhf(a); }
static inline float rint(float a) { return rintf(a); }
static inline float trunc(float a) { return truncf(a); }
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
