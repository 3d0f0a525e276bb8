// copies.h -- mbarriers, and copies that happen late, at a moment that is drawn
#pragma once
#include "cuda_on_cpu_trace.h"
#include "shared_memory.h"

namespace {

Word mark_of(const unsigned char* address) {
  return 0x6d62617272696572ull ^ reinterpret_cast<Word>(address);
}

// Null after a fault, which the caller never sees: fail() does not come back to a fiber.
Mbarrier* find_mbarrier(Block*& block, unsigned long long* address) {
  block = block_at(address, 8);
  if (block == nullptr || reinterpret_cast<Word>(address) % 8 != 0) {
    fail(name_of(*launch.current) +
         " uses an mbarrier that is not 8 aligned bytes of shared memory.");
    return nullptr;
  }
  const unsigned offset = reinterpret_cast<unsigned char*>(address) - block->smem;
  for (Mbarrier& barrier : block->barriers) {
    if (barrier.offset != offset) continue;
    const Word mark = mark_of(block->smem + offset);
    if (memcmp(address, &mark, 8) != 0) {
      fail(text("The mbarrier at byte %u of the shared memory of block %u was overwritten.", offset,
                block->index));
      return nullptr;
    }
    return &barrier;
  }
  fail(name_of(*launch.current) +
       text(" uses the mbarrier at byte %u of the shared memory of block %u before mbarrier_init.",
            offset, block->index));
  return nullptr;
}

void complete_if_due(Block& block, Mbarrier& barrier) {
  if (barrier.missing != 0 || barrier.missing_bytes != 0) return;
  ++barrier.phase;
  barrier.missing = barrier.expected;
  const unsigned index = &barrier - block.barriers.data();
  for (unsigned thread = 0; thread < launch.block_size; ++thread)
    if (block.threads[thread].state == State::mbarrier && block.threads[thread].barrier == index)
      make_ready(block.threads[thread]);
}

void arrive(unsigned long long* address, unsigned num_bytes) {
  Block* block;
  Mbarrier& barrier = *find_mbarrier(block, address);
  if (barrier.missing == 0)
    return fail(name_of(*launch.current) +
                text(" arrives at the mbarrier at byte %u of shared memory, which %u have "
                     "already reached in this phase: its whole count.",
                     barrier.offset, barrier.expected));
  trace::step(trace::Kind::arrive, trace::What::mbarrier, barrier.offset);
  --barrier.missing;
  barrier.missing_bytes += num_bytes;
  complete_if_due(*block, barrier);
}

// As memcpy, but a load may read what shares 16 bytes with the first and the last of a row: a GPU's
// memory is handed out in larger units. The address sanitizer sees every other access.
__attribute__((no_sanitize("address"))) void copy_units(unsigned char* to,
                                                        const unsigned char* from,
                                                        unsigned num_bytes) {
  for (unsigned byte = 0; byte < num_bytes; ++byte)
    to[byte] = const_cast<const volatile unsigned char*>(from)[byte];
}

// The copy arrives: its bytes, then its mbarrier's count of them.
void finish_copy(unsigned index) {
  Copy& copy = launch.copies[index];
  copy_units(copy.smem, copy.sent ? copy.sent.get() : copy.global, copy.num_bytes);
  Mbarrier& barrier = copy.block->barriers[copy.barrier];
  barrier.missing_bytes -= copy.num_bytes;
  barrier.last_load_phase = barrier.phase;
  complete_if_due(*copy.block, barrier);
  if (index + 1 != launch.copies.size()) launch.copies[index] = std::move(launch.copies.back());
  launch.copies.pop_back();
}

void check_copy(const void* smem, const void* global, unsigned num_bytes) {
  const Word shared = reinterpret_cast<Word>(smem), other = reinterpret_cast<Word>(global);
  if (shared % 16 != 0 || other % 16 != 0 || num_bytes % 16 != 0)
    return fail(name_of(*launch.current) +
                text(" calls bulk_load of %u bytes with shared address ...%llx and global address "
                     "...%llx: both addresses and the size must be multiples of 16.",
                     num_bytes, shared & 0xff, other & 0xff));
  if (block_at(smem, num_bytes) == nullptr)
    fail(name_of(*launch.current) +
         text(" calls bulk_load of %u bytes outside its dynamic shared memory.", num_bytes));
}

}  // namespace
