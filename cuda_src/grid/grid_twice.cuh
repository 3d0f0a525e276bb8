// grid_twice.cuh -- path `grid` without slots: each row is read twice
//
// A block first sums its slices of 32 rows. Meanwhile the sums travel between the blocks. Then it
// reads the slices again, a pack of columns of all these rows after the other. So the sums of
// dweight and dbias of only one pack are in registers.
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

// Work: see grid_turns.cuh; also to_sum_any(pack), packs_in_flight, and parameters.of_any(pack).
template <class Work>
struct GridTwice {
  using Shape = typename Work::Shape;
  using Loaded = typename Work::Loaded;
  using Row = typename Work::Row;
  static constexpr int most_rows = 32, packs_at_once = Work::packs_in_flight, rows_at_once = 4;

  const typename Work::Exchange& exchange;
  Work& work;
  long long num_turns;

  __device__ __forceinline__ void run() {
    work.parameters.load_all();
    if (num_turns == 0) {  // there are more groups than rows
      for (int pack = 0; pack < Shape::num_packs; ++pack)
        if (present(pack)) work.write_sums(pack, typename Work::Sums{}, false);
    }
    for (long long first = 0; first < num_turns; first += most_rows) {
      const int count = static_cast<int>(min(num_turns - first, 0LL + most_rows));
      const Row rows = sum_rows(first, count);
      if (work.cols.size() > 0) write_rows(first, count, rows);
    }
  }

 private:
  __device__ __forceinline__ bool present(int pack) const {
    return Shape::col(pack) < work.cols.size();
  }
  // Of a pack; of the last one of the slice, if the pack lies beyond it.
  __device__ __forceinline__ Loaded load(long long turn, int pack) const {
    const int col = min(Shape::col(pack), work.cols.size() - Work::pack_size);
    return work.streams.load_again(turn, col);
  }
  // Lane k gets row first + k.
  __device__ __forceinline__ Row sum_rows(long long first, int count) {
    Row rows{};
    const auto receive = [&](int at) {
      Row row = work.begin_row(first + at);
      work.finish_row(first + at, row, exchange.total(first + at));
      if (threadIdx.x % 32 == at) rows = row;
    };
    const int num_packs = work.cols.size() > 0 ? Shape::num_packs : 0;
    for (int at = 0; at < count; ++at) {
      work.begin_sums(first + at);
#pragma unroll 1
      for (int pack = 0; pack < num_packs; pack += packs_at_once) {
        Loaded loaded[packs_at_once];
#pragma unroll
        for (int each = 0; each < packs_at_once; ++each)
          loaded[each] = load(first + at, pack + each);
#pragma unroll
        for (int each = 0; each < packs_at_once; ++each)
          if (present(pack + each))
            work.sum(pack + each, loaded[each], work.to_sum_any(pack + each));
      }
      if (at >= Shape::turns_behind) receive(at - Shape::turns_behind);
      exchange.put(first + at, work.value());
    }
    for (int at = max(0, count - Shape::turns_behind); at < count; ++at) receive(at);
    return rows;
  }
  __device__ __forceinline__ void write_rows(long long first, int count, const Row& rows) {
#pragma unroll 1
    for (int pack = 0; pack < Shape::num_packs; ++pack) {
      typename Work::Kept kept;
      typename Work::Sums sums;
      if (present(pack)) kept = work.parameters.of_any(pack);
#pragma unroll 1
      for (int at = 0; at < count; at += rows_at_once) {
        Loaded loaded[rows_at_once];
#pragma unroll
        for (int each = 0; each < rows_at_once; ++each)
          loaded[each] = load(first + min(at + each, count - 1), pack);
#pragma unroll
        for (int each = 0; each < rows_at_once; ++each) {
          const Row row = row_of_lane(rows, min(at + each, count - 1));
          if (present(pack) && at + each < count)
            work.write(first + at + each, row, pack, loaded[each], kept, sums);
        }
      }
      if (present(pack)) work.write_sums(pack, sums, first > 0);
    }
  }
};
