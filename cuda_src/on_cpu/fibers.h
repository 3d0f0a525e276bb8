// fibers.h -- fibers: the stacks of threads, and switching from one to another
// needs   x86-64 or AArch64 with ELF; elsewhere swapcontext, which is slower.
#pragma once
#include <cstring>

#include "cuda_on_cpu_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ADDRESS_SANITIZER 1
#endif
#endif

#ifdef WITH_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

extern "C" void on_cpu_fiber_main();

#if defined(__ELF__) && defined(__x86_64__)
// Saves the registers that a called function must preserve, then switches to another stack. Cheaper
// than swapcontext, which makes two system calls for the signal mask.
asm(R"(
.text
.globl on_cpu_switch
.hidden on_cpu_switch
.type on_cpu_switch, @function
on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size on_cpu_switch, .-on_cpu_switch
)");
#define RETURN_WORD 6
#define FRAME_WORDS 8  // entry must see a stack pointer of 8 modulo 16, as after a call
#elif defined(__ELF__) && defined(__aarch64__)
asm(R"(
.text
.globl on_cpu_switch
.hidden on_cpu_switch
.type on_cpu_switch, %function
on_cpu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size on_cpu_switch, .-on_cpu_switch
)");
#define RETURN_WORD 11
#define FRAME_WORDS 20
#else
#define WITH_UCONTEXT 1
#include <ucontext.h>
#endif

#ifndef WITH_UCONTEXT
extern "C" void on_cpu_switch(void** from, void* to);
#endif

namespace {

using Word = unsigned long long;

struct Context {
#ifdef WITH_UCONTEXT
  ucontext_t context;
#else
  void* stack_pointer;
#endif
  const void* bottom;  // of its stack, which the address sanitizer wants to know
  size_t stack_size;
};

#ifdef WITH_ADDRESS_SANITIZER
constexpr size_t stack_size = 256 << 10;  // red zones make frames several times larger
#else
constexpr size_t stack_size = 64 << 10;
#endif
constexpr unsigned most_threads = 1024, most_blocks = 16, guard_bytes = 512;
constexpr unsigned char guard_byte = 0xa5;
constexpr Word stack_mark = 0x5ac3d2e1f00f1e2d;

void prepare(Context& context, unsigned char* stack, unsigned index) {
  // The last fiber on this stack may have ended in the middle of a call.
  ASAN_UNPOISON_MEMORY_REGION(stack, stack_size);
  memcpy(stack, &stack_mark, sizeof stack_mark);
  context.bottom = stack;
  context.stack_size = stack_size;
#ifdef WITH_UCONTEXT
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = stack_size;
  context.context.uc_link = nullptr;
  makecontext(&context.context, on_cpu_fiber_main, 0);
  (void)index;
#else
  // Stacks that all began at the same offset of a page would compete for the same few lines of the
  // first cache.
  const size_t top = stack_size - (index * 5 % 32) * 128;
  Word* frame = reinterpret_cast<Word*>(stack + top) - FRAME_WORDS;
  memset(frame, 0, FRAME_WORDS * sizeof(Word));
  frame[RETURN_WORD] = reinterpret_cast<Word>(&on_cpu_fiber_main);
  context.stack_pointer = frame;
#endif
}

}  // namespace
