// matrix_calls.h -- tiles and products of a warpgroup, of the CPU build
//
// A product is computed as late as a GPU may compute it, when its group is waited for. So a stage
// that is given back too early gives wrong results.
#pragma once
#include "warp_calls.h"

namespace on_cpu {

// Addresses of shared memory as the GPU has them: dynamic memory begins at byte 1024.
inline constexpr unsigned first_smem_address = 1024;
inline unsigned smem_address(const void* pointer) {
  return first_smem_address + unsigned(static_cast<const unsigned char*>(pointer) - smem);
}

// words: of a matrix of 2-byte elements: its address, columns, rows, bytes from row to row, then
// the columns and rows of a tile. blocks: of the cluster, a bit each.
void tile_load(void* smem, const unsigned long long* words, int col, int row,
               unsigned long long* barrier, unsigned blocks);

// wgmma.mma_async m64nNk16, N: rows of weight. The operands are read when the product is waited
// for. a: null where the 64 rows are in shared memory, at x.
void multiply(float* sums, const unsigned* a, unsigned long long x, unsigned long long weight,
              bool adds, bool is_bfloat16, unsigned rows_of_weight = 256);
void products_commit();
void products_wait(unsigned pending_groups);

}  // namespace on_cpu
