// Fibers for the kernel emulator: a stack per emulated thread and the switch between two of them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define GRPO_EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define GRPO_EMULATOR_ASAN 1
#endif
#endif

#ifdef GRPO_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// swapcontext() saves the signal mask with a system call, which is far slower than the kernel code between two
// switches.
#if defined(__x86_64__)
#define GRPO_EMULATOR_FAST_SWITCH 1
#else
#include <ucontext.h>
#endif

#ifdef GRPO_EMULATOR_FAST_SWITCH
// Top-level asm, because the compiler reasons about the registers that a naked function leaves alone. The group section
// lets several translation units include this header, unless they are compiled with -flto.
__asm__(R"(
.pushsection .text.grpo_kernels_swap_stack,"axG",@progbits,grpo_kernels_swap_stack,comdat
.weak grpo_kernels_swap_stack
.hidden grpo_kernels_swap_stack
.type grpo_kernels_swap_stack,@function
grpo_kernels_swap_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size grpo_kernels_swap_stack,.-grpo_kernels_swap_stack
.popsection
)");
extern "C" __attribute__((visibility("hidden"))) void grpo_kernels_swap_stack(void** saved, void* loaded);
#endif

// Hidden, so that two emulated libraries in one process do not share this state.
#pragma GCC visibility push(hidden)
namespace grpo_kernels::emulation {

#ifdef GRPO_EMULATOR_ASAN
// Instrumented frames are larger, and AddressSanitizer writes its report on the stack of the faulting fiber.
inline constexpr std::size_t kStackBytes = 256 * 1024;
#else
inline constexpr std::size_t kStackBytes = 64 * 1024;
#endif

// A suspended execution: a fiber, or the caller of launch(). AddressSanitizer needs the stack bounds at every switch.
struct Context {
#ifdef GRPO_EMULATOR_FAST_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
  const void* stack_bottom = nullptr;
  std::size_t stack_bytes = 0;
  void* fake_stack = nullptr;
};

inline Context* switched_from = nullptr;

// Must be called first in a context that has just been switched to.
inline void arrive([[maybe_unused]] Context& here) {
#ifdef GRPO_EMULATOR_ASAN
  // the stack bounds of launch()'s caller are known only from here
  __sanitizer_finish_switch_fiber(here.fake_stack, &switched_from->stack_bottom, &switched_from->stack_bytes);
#endif
}

inline void switch_context(Context& from, Context& to) {
  switched_from = &from;
#ifdef GRPO_EMULATOR_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
#ifdef GRPO_EMULATOR_FAST_SWITCH
  grpo_kernels_swap_stack(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.registers, &to.registers);
#endif
  arrive(from);
}

// A stack above an inaccessible page, so that an overflow faults.
class Fiber {
 public:
  Fiber() : guard_bytes_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    memory_ = mmap(nullptr, guard_bytes_ + kStackBytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory_, guard_bytes_, PROT_NONE);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() { munmap(memory_, guard_bytes_ + kStackBytes); }

  // Makes the next switch to this fiber call `entry`, which must not return, and discards what ran here before. `index`
  // spreads the tops of the stacks over the cache sets.
  void prepare(void (*entry)(), std::size_t index) {
    char* const bottom = static_cast<char*>(memory_) + guard_bytes_;
#ifdef GRPO_EMULATOR_ASAN
    // abandoned frames never ran the code that unpoisons them
    __asan_unpoison_memory_region(bottom, kStackBytes);
#endif
    context.stack_bottom = bottom;
    context.stack_bytes = kStackBytes;
    context.fake_stack = nullptr;
    const std::size_t usable = kStackBytes - (index % 32) * 128;
#ifdef GRPO_EMULATOR_FAST_SWITCH
    // the null return address ends stack walks and aligns the stack as a call would
    void** top = reinterpret_cast<void**>(bottom + usable);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    context.stack_pointer = top;
#else
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = bottom;
    context.registers.uc_stack.ss_size = usable;
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, entry, 0);
#endif
  }

  Context context;

 private:
  std::size_t guard_bytes_;
  void* memory_ = nullptr;
};

}  // namespace grpo_kernels::emulation
#pragma GCC visibility pop
