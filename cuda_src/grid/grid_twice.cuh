// grid_twice.cuh -- path `grid` without slots: each row is read twice
//
// A block first sums its slices of 32 rows. Meanwhile the sums travel between the blocks. Then it
// reads the slices again, a pack of columns of all these rows after the other. So the sums of
// dweight and dbias of only one pack are in registers.
#pragma once
#include "grid_exchange.cuh"
#include "memory.cuh"

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

// Packs travel through a ring of places in shared memory. Work: see grid_turns.cuh.
template <class Work>
struct GridTwice {
  using Shape = typename Work::Shape;
  using Row = typename Work::Row;
  static constexpr int rows_at_once = 32, num_packs = Shape::num_packs;
  static constexpr int ahead = Shape::ring_bytes / Work::place_bytes - 1;  // packs in flight
  static constexpr int end = (ahead + 1) * Work::place_bytes;

  const typename Work::Exchange& exchange;
  Work& work;
  long long num_turns;
  int place = 0, free_place = 0;

  __device__ __forceinline__ void run() {
    work.parameters.load_all();
    if (num_turns == 0) {  // there are more groups than rows
      for (int pack = 0; pack < num_packs; ++pack)
        if (present(pack)) work.write_sums(pack, typename Work::Sums{}, false);
    }
    for (long long first = 0; first < num_turns; first += rows_at_once) {
      const int count = static_cast<int>(min(num_turns - first, 0LL + rows_at_once));
      const Row rows = sum_rows(first, count);
      if (work.cols.size() > 0) write_rows(first, count, rows);
    }
  }

 private:
  __device__ __forceinline__ static void advance(int& place) {
    place = place + Work::place_bytes == end ? 0 : place + Work::place_bytes;
  }
  __device__ __forceinline__ bool present(int pack) const {
    return Shape::col(pack) < work.cols.size();
  }
  __device__ __forceinline__ void copy_pack(long long turn, int pack) {
    if (present(pack)) work.copy(turn, pack, free_place);
  }
  // Calls use(outer, inner) for all pairs of two numbers, when what begin(outer, inner) copies has
  // arrived in `place`.
  template <class Begin, class Use>
  __device__ __forceinline__ void for_each(int num_outer, int num_inner, Begin begin, Use use) {
    int outer_ahead = 0, inner_ahead = 0;
    const auto copy = [&] {
      if (outer_ahead < num_outer) {
        begin(outer_ahead, inner_ahead);
        inner_ahead = inner_ahead + 1 == num_inner ? 0 : inner_ahead + 1;
        outer_ahead += inner_ahead == 0;
      }
      async_commit();
      advance(free_place);
    };
    for (int at = 0; at < ahead; ++at) copy();
    for (int outer = 0; outer < num_outer; ++outer) {
#pragma unroll 1
      for (int inner = 0; inner < num_inner; ++inner) {
        copy();
        async_wait<ahead>();
        use(outer, inner);
        advance(place);
      }
    }
    async_wait<0>();
    free_place = place = 0;
  }
  // Lane k gets row first + k.
  __device__ __forceinline__ Row sum_rows(long long first, int count) {
    Row rows{};
    const auto receive = [&](int at) {
      Row row = work.begin_row(first + at);
      work.finish_row(first + at, row, exchange.total(first + at));
      if (threadIdx.x % 32 == at) rows = row;
    };
    for_each(
        count, num_packs, [&](int at, int pack) { copy_pack(first + at, pack); },
        [&](int at, int pack) {
          if (pack == 0) work.begin_sums(first + at);
          if (present(pack)) work.sum(pack, work.load(place), work.to_sum_any(pack));
          if (pack + 1 < num_packs) return;
          if (at >= Shape::turns_behind) receive(at - Shape::turns_behind);
          exchange.put(first + at, work.value());
        });
    for (int at = max(0, count - Shape::turns_behind); at < count; ++at) receive(at);
    return rows;
  }
  __device__ __forceinline__ void write_rows(long long first, int count, const Row& rows) {
    typename Work::Kept kept;
    typename Work::Sums sums;
    for_each(
        num_packs, count, [&](int pack, int at) { copy_pack(first + at, pack); },
        [&](int pack, int at) {
          if (at == 0) sums = {};
          if (at == 0 && present(pack)) kept = work.parameters.of_any(pack);
          const Row row = row_of_lane(rows, at);
          if (!present(pack)) return;
          work.write(first + at, row, pack, work.load(place), kept, sums);
          if (at + 1 == count) work.write_sums(pack, sums, first > 0);
        });
  }
};
