// grid_twice.cuh -- path `grid` without slots: each row is read twice
//
// A block first sums its slices of 32 rows. Meanwhile the sums travel between the blocks. Then it
// reads the slices again, a pack of columns of all these rows after the other. So the parameters
// and the sums of only one pack are in registers.
#pragma once
#include "grid_exchange.cuh"

// The row that a lane has, to all lanes. Row: of floats.
template <class Row>
__device__ __forceinline__ Row row_of_lane(const Row& row, int lane) {
  Row found;
#pragma unroll
  for (int at = 0; at < static_cast<int>(sizeof(Row) / sizeof(float)); ++at)
    reinterpret_cast<float*>(&found)[at] =
        __shfl_sync(0xffffffffu, reinterpret_cast<const float*>(&row)[at], lane);
  return found;
}

// Work: see grid_turns.cuh.
template <class Work>
struct GridTwice {
  using Shape = typename Work::Shape;
  using Loaded = typename Work::Loaded;
  using Row = typename Work::Row;
  static constexpr int at_once = Work::packs_in_flight;

  const typename Work::Exchange& exchange;
  Work& work;
  long long num_turns;

  __device__ __forceinline__ void run() {
    if (work.cols.size() == 0) return take_empty_turns();
    for (long long first = 0; first < num_turns; first += 32) {
      const int count = static_cast<int>(min(num_turns - first, 32LL));
      const Row rows = sum_rows(first, count);
      write_rows(first, count, rows);
    }
  }

 private:
  // Columns of a pack; of the last one of the slice, if the pack lies beyond it.
  __device__ __forceinline__ int col_of(int pack) const {
    return work.cols.first_col + min(Shape::col(pack), work.cols.size() - Work::pack_size);
  }
  // Lane k gets row first + k.
  __device__ __forceinline__ Row sum_rows(long long first, int count) {
    Row rows{};
    const auto receive = [&](int at) {
      Row row = work.begin_row(first + at);
      work.finish_row(first + at, row, exchange.total(first + at));
      if (threadIdx.x % 32 == at) rows = row;
    };
    for (int at = 0; at < count; ++at) {
      work.begin_sums(first + at);
#pragma unroll 1
      for (int pack = 0; pack < Shape::num_packs; pack += at_once) {
        Loaded loaded[at_once];
        decltype(work.to_sum_at(0)) kept[at_once];
#pragma unroll
        for (int each = 0; each < at_once; ++each) {
          loaded[each] = work.load(first + at, col_of(pack + each));
          kept[each] = work.to_sum_at(col_of(pack + each));
        }
#pragma unroll
        for (int each = 0; each < at_once; ++each)
          if (Shape::col(pack + each) < work.cols.size())
            work.sum(pack + each, loaded[each], kept[each]);
      }
      if (at >= Shape::turns_behind) receive(at - Shape::turns_behind);
      exchange.put(first + at, work.value());
    }
    for (int at = max(0, count - Shape::turns_behind); at < count; ++at) receive(at);
    return rows;
  }
  // The last rows first: they may still be in the L2 cache.
  __device__ __forceinline__ void write_rows(long long first, int count, const Row& rows) {
#pragma unroll 1
    for (int pack = 0; pack < Shape::num_packs; ++pack) {
      const bool present = Shape::col(pack) < work.cols.size();
      const auto kept = work.parameters.load_at(col_of(pack));
      typename Work::Sums sums;
#pragma unroll 1
      for (int at = count - 1; at >= 0; at -= 4) {
        Loaded loaded[4];
#pragma unroll
        for (int each = 0; each < 4; ++each)
          loaded[each] = work.load(first + max(at - each, 0), col_of(pack));
#pragma unroll
        for (int each = 0; each < 4; ++each) {
          const Row row = row_of_lane(rows, max(at - each, 0));
          if (present && at >= each)
            work.write(first + at - each, row, pack, loaded[each], kept, sums);
        }
      }
      if (present) work.write_sums(pack, sums, first > 0);
    }
  }
  // A block without columns takes part in the exchange.
  __device__ __forceinline__ void take_empty_turns() {
    for (long long turn = 0; turn < num_turns; ++turn) {
      work.begin_sums(turn);
      if (turn >= Shape::turns_behind) exchange.total(turn - Shape::turns_behind);
      exchange.put(turn, work.value());
    }
  }
};
