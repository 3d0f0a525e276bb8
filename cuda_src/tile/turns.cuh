// turns.cuh -- which rows a block or cluster works on, one after the other
#pragma once
#include "tile.cuh"

// Neighbouring blocks take neighbouring rows. The first num_first blocks, which the hardware starts
// first, take rows_of_first rows each. The other blocks start whenever one has finished and share
// the remaining rows. So a multiprocessor that gets less memory bandwidth works on fewer rows.
template <Tile tile>
struct Turns {
  long long first_row, step;
  unsigned count;

  __device__ __forceinline__ explicit Turns(long long num_rows, long long num_first = 0,
                                            long long rows_of_first = 0) {
    const long long block = blockIdx.x / tile.cluster_size;
    const long long num_blocks = gridDim.x / tile.cluster_size;
    const bool is_first = block < num_first;
    const long long shared_out = num_first * rows_of_first;
    const int group =
        tile.rows_per_block > 1 ? static_cast<int>(threadIdx.x) / tile.threads_per_row : 0;
    first_row = (is_first ? block : block - num_first) * tile.rows_per_block + group +
                (is_first ? 0 : shared_out);
    step = (is_first ? num_first : num_blocks - num_first) * tile.rows_per_block;
    const long long end = is_first ? min(shared_out, num_rows) : num_rows;
    count = first_row < end ? static_cast<unsigned>((end - first_row + step - 1) / step) : 0;
  }
};
