// Changes of stacks: from one fiber to another, or to the scheduler. Knows nothing of who goes on when.
#ifndef CELLAR_SIM_STACKS
#define CELLAR_SIM_STACKS
#include "fibers.h"

#ifdef __linux__
#define CELLAR_SIM_X18 "x18", // other systems keep it for themselves
#else
#define CELLAR_SIM_X18
#endif

namespace sim {

// Goes on at a place, and here when something comes back. A jump that is inlined: fibers do the same things one after
// the other, so a CPU predicts their returns from each other's calls, unless there is a call in between. Registers count
// as overwritten, so the compiler keeps on the stack what is needed of them.
[[gnu::always_inline]] static inline void go(Place &from, Place &to) {
#if defined(__x86_64__)
  Place *f = &from, *t = &to;
  asm volatile("lea 1f(%%rip), %%rax\n mov %%rax, (%0)\n mov %%rsp, 8(%0)\n mov %%rbp, 16(%0)\n"
               "mov 8(%1), %%rsp\n mov 16(%1), %%rbp\n jmp *(%1)\n 1:"
               : "+D"(f), "+S"(t)
               :
               : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1",
                 "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
                 "xmm14", "xmm15", "memory", "cc");
#elif defined(__aarch64__)
  register Place *f asm("x0") = &from, *t asm("x1") = &to;
  asm volatile("adr x9, 1f\n mov x10, sp\n stp x9, x10, [x0]\n str x29, [x0, 16]\n"
               "ldp x9, x10, [x1]\n ldr x29, [x1, 16]\n mov sp, x10\n br x9\n 1:"
               : "+r"(f), "+r"(t)
               :
               : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17",
                 CELLAR_SIM_X18 "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "v0", "v1",
                 "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17",
                 "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31",
                 "memory", "cc");
#else
#error "the simulator changes stacks on x86-64 and AArch64"
#endif
}

// Where a function begins on a stack that ends there.
inline Place beginning(void (*function)(), char *end) {
  uintptr_t stack = uintptr_t(end) & ~uintptr_t(15);
#ifdef __x86_64__
  stack -= 8; // where a call leaves its return address
#endif
  return {(void *)function, (void *)stack, nullptr};
}

} // namespace sim
#endif
