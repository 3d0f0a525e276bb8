// shared_memory.h -- the shared memory of blocks: unwritten bytes, and guards around them
#pragma once
#include "launch_state.h"

namespace {

// Mostly ones, a NaN in every floating type, mixed with noise: unwritten memory must not look like
// zeros.
void fill_with_garbage(unsigned char* smem) {
  for (unsigned byte = 0; byte < launch.smem_bytes; byte += 8) {
    const unsigned drawn = draw();
    const Word word = drawn & 3 ? ~0ull : Word(drawn) << 32 | draw();
    memcpy(smem + byte, &word, launch.smem_bytes - byte < 8 ? launch.smem_bytes - byte : 8);
  }
}

size_t stride_of_smem() {
  return guard_bytes + (launch.smem_bytes + 127) / 128 * 128 + guard_bytes;
}

size_t guard_after_bytes() { return stride_of_smem() - guard_bytes - launch.smem_bytes; }

void place_guards(Block& block) {
  unsigned char *before = block.smem - guard_bytes, *after = block.smem + launch.smem_bytes;
  memset(before, guard_byte, guard_bytes);
  memset(after, guard_byte, guard_after_bytes());
  ASAN_POISON_MEMORY_REGION(before, guard_bytes);
  ASAN_POISON_MEMORY_REGION(after, guard_after_bytes());
}

void check_guards(Block& block) {
  unsigned char *before = block.smem - guard_bytes, *after = block.smem + launch.smem_bytes;
  ASAN_UNPOISON_MEMORY_REGION(before, guard_bytes);
  ASAN_UNPOISON_MEMORY_REGION(after, guard_after_bytes());
  int stray = 0;  // the byte nearest to the block's own that was written
  for (unsigned byte = guard_after_bytes(); byte-- > 0;)
    if (after[byte] != guard_byte) stray = launch.smem_bytes + byte;
  for (unsigned byte = 0; byte < guard_bytes && stray <= 0; ++byte)
    if (before[byte] != guard_byte) stray = int(byte) - int(guard_bytes);
  const bool overrun = stray != 0 || (launch.smem_bytes == 0 && after[0] != guard_byte);
  if (overrun)
    fail(text(
        "Something wrote at byte %d, outside the %u bytes of dynamic shared memory of block %u.",
        stray, launch.smem_bytes, block.index));
}

// The block of this cluster in whose shared memory [pointer, pointer + num_bytes) lies, or null.
Block* block_at(const void* pointer, size_t num_bytes) {
  const auto address = reinterpret_cast<Word>(pointer);
  for (unsigned rank = 0; rank < launch.num_blocks; ++rank) {
    const auto start = reinterpret_cast<Word>(launch.blocks[rank].smem);
    if (address >= start && address - start + num_bytes <= launch.smem_bytes)
      return &launch.blocks[rank];
  }
  return nullptr;
}

}  // namespace
