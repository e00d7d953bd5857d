// The scheduler of the simulator: what fibers.h declares, and launches from Rust.
#include "fibers.h"
#include "stacks.h"
#include <algorithm>

namespace sim {

thread_local Block *block = nullptr;
const Kernel *kernels = nullptr, *metal_kernels = nullptr;
// Stacks begin at different places of a page: else the lines that fibers use most would share a set of each cache.
static constexpr size_t kStackBytes = 128 << 10, kSpread = 9 * 64, kPlaces = 128;

static const char *kPartOfWarp = "what a warp does together is done by some of its lanes";

static bool waits(const Fiber &f) { return f.waits_for && f.waits_for->generation == f.generation; }

// Which thread comes at a place in the order of a block's threads, and the place of a thread.
static uint32_t ordered(const Block &b, uint32_t i) { return b.reverse ? b.n_threads - 1 - i : i; }

// Where the warp's next thread that can goes on; without one, the scheduler.
static Place &next(Block &b) {
  uint32_t i = ordered(b, b.tid), end = std::min(i / 32 * 32 + 32, b.n_threads);
  while (++i < end) {
    uint32_t tid = ordered(b, i);
    Fiber &f = b.fibers[tid];
    if (f.done || waits(f)) continue;
    b.tid = tid;
    f.waits_for = nullptr;
    return f.state;
  }
  return b.scheduler;
}

// Gives the CPU to the block's other threads.
static void yield(Block &b) {
  Place &here = b.fibers[b.tid].state;
  go(here, next(b));
}

void fail(const char *error) {
  block->error = error;
  Place nowhere;
  go(nowhere, block->scheduler);
  __builtin_unreachable();
}

static void wait(Block &b, Barrier &barrier) {
  if (++barrier.arrived >= barrier.alive) {
    barrier.arrived = 0;
    ++barrier.generation;
    ++b.progress;
  } else {
    Fiber &f = b.fibers[b.tid];
    f.waits_for = &barrier;
    f.generation = barrier.generation;
    yield(b);
  }
}

static void leave(Barrier &barrier) {
  --barrier.alive;
  if (barrier.alive && barrier.arrived >= barrier.alive) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}

// Flat, so that no call is in between: see `go`.
[[gnu::flatten]] void sync_group() { wait(*block, block->group); }
[[gnu::flatten]] void sync_warp(uint32_t place) {
  Barrier &warp = block->warps[block->tid / 32];
  if (warp.arrived == 0) warp.place = place;
  if (warp.alive < 32 || warp.place != place) fail(kPartOfWarp);
  wait(*block, warp);
}

void *shared(int key, size_t bytes, size_t limit) {
  for (const Shared &s : block->shared)
    if (s.key == key) return block->memory + s.at;
  size_t at = block->shared_used;
  if (at + bytes > limit) fail("more shared memory than the device has");
  block->shared_used = (at + bytes + 15) / 16 * 16;
  block->shared.push_back({key, at});
  return block->memory + at;
}

void copy_async(void *to, const void *from, uint32_t len) {
  if ((uintptr_t(to) | uintptr_t(from)) % len) fail("an asynchronous copy that is not aligned");
  Fiber &f = block->fibers[block->tid];
  f.copies.push_back({to, from, len, f.copy_group});
}

void copy_commit() { ++block->fibers[block->tid].copy_group; }

void copy_wait(uint32_t n_under_way) {
  Fiber &f = block->fibers[block->tid];
  auto arrives = [&](const AsyncCopy &c) { return c.group + n_under_way < f.copy_group; };
  for (const AsyncCopy &c : f.copies)
    if (arrives(c)) memcpy(c.to, c.from, c.len);
  f.copies.erase(std::remove_if(f.copies.begin(), f.copies.end(), arrives), f.copies.end());
}

// Rounds to nearest, ties to even.
uint16_t float_half(float value) {
  uint32_t u;
  memcpy(&u, &value, 4);
  uint16_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7fff;
  if (u >= 0x477ff000) return sign | 0x7c00;
  if (u < 0x38800000) { // below the smallest normal half: a multiple of 2^-24
    float magnitude;
    memcpy(&magnitude, &u, 4);
    return sign | uint16_t(nearbyintf(magnitude * 16777216.0f));
  }
  u += 0xfff + (u >> 13 & 1);
  return sign | uint16_t((u - 0x38000000) >> 13);
}

// What a fiber does for ever: a thread of one block after the other.
static void run_threads() {
  for (;;) {
    Block *b = block;
    b->call(b->kernel, b->args);
    Fiber &f = b->fibers[b->tid];
    f.done = true;
    ++b->progress;
    leave(b->group);
    Barrier &warp = b->warps[b->tid / 32];
    if (warp.arrived) fail(kPartOfWarp);
    leave(warp);
    yield(*b);
  }
}

static void make(Fiber &f, uint32_t tid) {
  f.stack.reset(new char[kStackBytes + kPlaces * kSpread]);
  f.state = beginning(run_threads, f.stack.get() + kStackBytes + tid % kPlaces * kSpread);
}

// Runs a thread, and those of its warp that go on after it, until one waits or ends and none goes on.
static void resume(Block &b, uint32_t tid) {
  Fiber &f = b.fibers[tid];
  b.tid = tid;
  f.waits_for = nullptr;
  go(b.scheduler, f.state);
}

static void start(Block &b, uint32_t n_threads) {
  for (uint32_t tid = b.fibers.size(); tid < n_threads; ++tid) make(b.fibers.emplace_back(), tid);
  b.group = {n_threads, 0, 0};
  for (uint32_t w = 0; w < (n_threads + 31) / 32; ++w) b.warps[w] = {std::min(32u, n_threads - w * 32), 0, 0};
  b.shared.clear();
  b.shared_used = 0;
  memset(b.memory, 0xff, sizeof b.memory); // NaN, and numbers that nothing indexes
  for (auto &slots : b.slots) memset(slots, 0xff, n_threads * kSlotBytes);
  for (uint32_t tid = 0; tid < n_threads; ++tid) {
    Fiber &f = b.fibers[tid];
    f.done = false;
    f.waits_for = nullptr;
    f.copy_group = 0;
    f.copies.clear();
  }
}

// Each warp runs as far as it can before the next one does, so that none is in step with another
// unless a barrier says so.
static void run_block(Block &b) {
  start(b, b.n_threads);
  for (uint32_t left = b.n_threads; left;) {
    uint64_t before = b.progress, before_warp = 0;
    left = 0;
    for (uint32_t first = 0; first < b.n_threads; first += 32) {
      uint32_t end = std::min(first + 32, b.n_threads);
      do {
        before_warp = b.progress;
        for (uint32_t i = first; i < end; ++i) {
          const Fiber &f = b.fibers[ordered(b, i)];
          if (f.done || waits(f)) continue;
          resume(b, ordered(b, i));
          if (b.error) return;
          i = ordered(b, b.tid);
        }
      } while (b.progress != before_warp);
      for (uint32_t i = first; i < end; ++i) left += !b.fibers[ordered(b, i)].done;
    }
    if (left && b.progress == before) {
      b.error = "a barrier that not all threads reach";
      return;
    }
  }
}

} // namespace sim

// The kernels as C++, or as Metal.
static const sim::Kernel *first(int metal) { return metal ? sim::metal_kernels : sim::kernels; }
extern "C" const sim::Kernel *cellar_sim_find(const char *name, int metal) {
  for (const sim::Kernel *k = first(metal); k; k = k->next)
    if (!strcmp(k->name, name)) return k;
  return nullptr;
}
extern "C" const sim::Kernel *cellar_sim_next(const sim::Kernel *k, int metal) { return k ? k->next : first(metal); }
extern "C" const char *cellar_sim_name(const sim::Kernel *k) { return k->name; }
extern "C" const char *cellar_sim_file(const sim::Kernel *k) { return k->file; }
extern "C" uint32_t cellar_sim_threads(const sim::Kernel *k) { return k->threads; }
extern "C" uint32_t cellar_sim_n_args(const sim::Kernel *k) { return k->n_args; }
// The size of an argument's value; 0 where it is a buffer.
extern "C" uint32_t cellar_sim_arg(const sim::Kernel *k, uint32_t i) { return k->pointers[i] ? 0 : k->sizes[i]; }

// Runs a grid of blocks; returns what went wrong, or null.
extern "C" const char *cellar_sim_launch(const sim::Kernel *k, uint32_t x, uint32_t y, void *const *args, int reverse) {
  static thread_local std::unique_ptr<sim::Block> own;
  if (!own) own = std::make_unique<sim::Block>();
  sim::Block &b = *own;
  sim::block = &b;
  b.n_threads = k->threads;
  b.reverse = reverse;
  b.kernel = k->kernel;
  b.call = k->call;
  b.args = args;
  b.error = nullptr;
  for (b.y = 0; b.y < y; ++b.y)
    for (b.x = 0; b.x < x; ++b.x) {
      sim::run_block(b);
      if (b.error) {
        own.reset(); // fibers that wait are dropped with their stacks
        return b.error;
      }
    }
  return nullptr;
}
