// staged_row.cuh -- the next row, which the copy engine brings to shared memory
//
// While the threads of a block work on one row, the copy engine fetches the next one. The threads
// then read it from shared memory instead of from global memory, and keep no registers for it.
#pragma once
#include "bulk.cuh"
#include "register_row.cuh"

template <class Load, Tile tile>
struct StagedRow {
  using Held = typename Load::Held;
  static constexpr int slot_bytes = (tile.cols() * static_cast<int>(sizeof(Held)) + 15) / 16 * 16;

  Held* slot;
  unsigned long long* barrier;
  unsigned turn = 0;

  // smem: 16-byte aligned. The caller synchronises the block before the first row is taken.
  __device__ __forceinline__ explicit StagedRow(unsigned char* smem)
      : slot(reinterpret_cast<Held*>(smem)),
        barrier(reinterpret_cast<unsigned long long*>(smem + slot_bytes)) {
    if (threadIdx.x == 0) bulk_barrier_init(barrier);
  }

  // Called by the thread that made the barrier, when all threads have taken the row before.
  __device__ __forceinline__ void fetch(const Load& load, long long row, int num_cols) const {
    const unsigned bytes = static_cast<unsigned>(num_cols) * static_cast<unsigned>(sizeof(Held));
    bulk_expect(barrier, bytes);
    bulk_copy(slot, load.row_start(row), bytes, barrier);
  }

  // Waits for the row and loads it into registers.
  __device__ __forceinline__ void take(RegisterRow<Load, tile>& values, Slice cols) {
    bulk_wait(barrier, turn++);
    values.fetch_own({slot + register_col<tile>(0)}, cols);
  }
};
