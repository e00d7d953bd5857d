// Runs the threads of a thread block as fibers of one CPU thread: barriers, exchanges within a warp,
// poisoned shared memory, copies that arrive when they are waited for.
//
// A block's warps run one after the other, and so do the threads of a warp, each as far as it can, in
// ascending or descending order: what two orders give differs where a barrier is missing. Knows nothing
// of kernels.
#ifndef CELLAR_SIM_FIBERS
#define CELLAR_SIM_FIBERS
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace sim {

// Threads that wait for each other. A thread that ends is no longer waited for, but at what a warp does together:
// there, all lanes must be at the same place of the source.
struct Barrier {
  uint32_t alive = 0, arrived = 0, generation = 0, place = 0;
};

// Where a fiber goes on, or the scheduler: an instruction, the stack's end, the frame.
struct Place {
  void *at, *stack, *frame;
};

struct AsyncCopy {
  void *to;
  const void *from;
  uint32_t len, group;
};

struct Fiber {
  Place state;
  std::unique_ptr<char[]> stack;
  bool done = false;
  // It waits for this barrier while that is of this generation.
  const Barrier *waits_for = nullptr;
  uint32_t generation = 0;
  uint32_t copy_group = 0;
  std::vector<AsyncCopy> copies;
};

struct Shared {
  int key;
  size_t at;
};

constexpr size_t kSharedBytes = 48 << 10, kMaxThreads = 1024, kSlotBytes = 32;

// The block under way on this CPU thread.
struct Block {
  uint32_t tid = 0, x = 0, y = 0, n_threads = 0;
  bool reverse = false;
  std::vector<Fiber> fibers;
  Place scheduler;
  Barrier group;
  Barrier warps[kMaxThreads / 32];
  // What lanes exchange, by the parity of the warp's barrier.
  alignas(16) char slots[2][kMaxThreads][kSlotBytes];
  std::vector<Shared> shared;
  size_t shared_used = 0;
  alignas(16) char memory[kSharedBytes];
  uint64_t progress = 0;
  const char *error = nullptr;
  void (*call)(void (*)(), void *const *) = nullptr;
  void (*kernel)() = nullptr;
  void *const *args = nullptr;
};
extern thread_local Block *block;

// Ends the launch with an error.
[[noreturn]] void fail(const char *error);
void sync_group();
void sync_warp(uint32_t place);
// The shared array `key` of the kernel, the same for all threads of the block; `limit` is what all of
// them may take.
void *shared(int key, size_t bytes, size_t limit = kSharedBytes);
void copy_async(void *to, const void *from, uint32_t len);
void copy_commit();
void copy_wait(uint32_t n_under_way);
uint16_t float_half(float value);
inline float half_float(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 0) {
    float value = float(mantissa) * 5.9604644775390625e-8f; // 2^-24
    return sign ? -value : value;
  }
  uint32_t u = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  float value;
  memcpy(&value, &u, 4);
  return value;
}

// Gives the warp's lanes a value. Returns where theirs are, until the exchange after the next one: a lane
// writes there only when all have come to the barrier in between.
template <class T> [[gnu::always_inline]] inline const char (*share(const T &value, uint32_t place))[kSlotBytes] {
  static_assert(sizeof(T) <= kSlotBytes, "too large for an exchange");
  uint32_t tid = block->tid;
  auto *slots = block->slots[block->warps[tid / 32].generation & 1];
  memcpy(slots[tid], &value, sizeof(T));
  sync_warp(place);
  return slots + (tid & ~31u);
}

// The values of a warp's lanes.
template <class T> void gather(const T &value, T (&all)[32], uint32_t place) {
  const char(*slots)[kSlotBytes] = share(value, place);
  for (uint32_t lane = 0; lane < 32; ++lane) memcpy(&all[lane], slots[lane], sizeof(T));
}

template <class T> T exchange(T value, uint32_t lane, uint32_t place) {
  memcpy(&value, share(value, place)[lane & 31u], sizeof(T));
  return value;
}

// A kernel by name, with its file and the sizes of its arguments: 8 for a buffer, and of its settings.
struct Kernel {
  const char *name, *file;
  uint32_t threads, n_args;
  uint32_t sizes[32];
  bool pointers[32];
  void (*kernel)();
  void (*call)(void (*)(), void *const *);
  const Kernel *next;
};
extern const Kernel *kernels, *metal_kernels;

template <class T> constexpr bool is_pointer = false;
template <class T> constexpr bool is_pointer<T *> = true;

struct Registered {
  Kernel entry;
  template <class... P> Registered(const char *name, const char *file, uint32_t threads, void (*kernel)(P...)) {
    static_assert(sizeof...(P) <= 32, "too many arguments");
    entry = {name, file, threads, uint32_t(sizeof...(P)), {uint32_t(sizeof(P))...}, {is_pointer<P>...}, (void (*)())kernel,
             &Registered::call<P...>, kernels};
    kernels = &entry;
  }
  template <class... P> static void call(void (*kernel)(), void *const *args) {
    call_each((void (*)(P...))kernel, args, std::index_sequence_for<P...>());
  }
  template <class... P, size_t... I>
  static void call_each(void (*kernel)(P...), void *const *args, std::index_sequence<I...>) {
    kernel(*(typename std::remove_const<P>::type *)args[I]...);
  }
};

} // namespace sim
#endif
