// next_row.cuh -- the row that a thread works on next
#pragma once
#include "register_row.cuh"

// fetch() loads it into the same registers while the results of the present row are written. After
// the last row it is the last row again: a condition would take registers.
template <class Load, Tile tile>
struct NextRow {
  const Load& load;
  RegisterRow<Load, tile>& values;
  long long row;

  __device__ __forceinline__ NextRow(const Load& load, RegisterRow<Load, tile>& values,
                                     long long row, long long num_rows)
      : load(load), values(values), row(min(row, num_rows - 1)) {}
  __device__ __forceinline__ void fetch() const { values.fetch(load, row, values.cols); }
};
