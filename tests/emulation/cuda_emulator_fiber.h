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

// swapcontext() saves the signal mask with a system call at each switch, which is far slower than the kernel
// code between two switches; GRPO_EMULATOR_UCONTEXT forces it so that the fall-back can be tested on x86-64
// too.
#if defined(__x86_64__) && !defined(GRPO_EMULATOR_UCONTEXT)
#define GRPO_EMULATOR_FAST_SWITCH 1
#else
#include <ucontext.h>
#endif

#ifdef GRPO_EMULATOR_FAST_SWITCH
// A top-level asm keeps the compiler from reasoning about the registers the body leaves alone (it would with
// a naked function); the group section lets several translation units of one library include this header, if
// they are not compiled with -flto, which assembles them as one.
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

// Hidden: two emulated libraries in one process, perhaps of different builds, must not share this state.
#pragma GCC visibility push(hidden)
namespace grpo_kernels::emulation {

#ifdef GRPO_EMULATOR_ASAN
// Instrumented frames are larger, and AddressSanitizer writes its report on the stack of the faulting fiber.
inline constexpr std::size_t kStackBytes = 256 * 1024;
#else
inline constexpr std::size_t kStackBytes = 64 * 1024;
#endif

// A place from which execution can go on: a fiber, or the caller of launch(). Stack bounds are for
// AddressSanitizer, which has to be told of every change of stack.
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

// To be called first in a context that has just been switched to.
inline void arrive([[maybe_unused]] Context& here) {
#ifdef GRPO_EMULATOR_ASAN
  // The bounds of the stack of launch()'s caller are only known from here.
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

// A stack with an inaccessible page below it, so that an overflow faults instead of corrupting a neighbour.
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

  // Makes the next switch to this fiber call `entry`, which must not return; what ran here before is
  // forgotten. `index` spreads the tops of the stacks: at equal offsets they would compete for the same cache
  // sets.
  void prepare(void (*entry)(), std::size_t index) {
    char* const bottom = static_cast<char*>(memory_) + guard_bytes_;
#ifdef GRPO_EMULATOR_ASAN
    // Frames that were abandoned never ran the code that unpoisons them.
    __asan_unpoison_memory_region(bottom, kStackBytes);
#endif
    context.stack_bottom = bottom;
    context.stack_bytes = kStackBytes;
    context.fake_stack = nullptr;
    const std::size_t usable = kStackBytes - (index % 32) * 128;
#ifdef GRPO_EMULATOR_FAST_SWITCH
    // The null return address ends stack walks and gives `entry` the alignment a call would have given it.
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
