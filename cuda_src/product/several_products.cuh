// several_products.cuh -- norm_linear_several.cu: the weight's tiles, loaded and multiplied
//
// One thread loads them through a ring. A warpgroup multiplies 64 of a tile's outputs by this
// block's columns of all rows.
#pragma once
#include "narrow_product.cuh"
#include "several_memory.cuh"

// By one warp, of which one lane loads.
struct TileLoads {
  const SeveralMemory& memory;
  const SeveralPart& part;
  RingPlace place;
  int tile = 0, step = 0;  // the next one

  // Fills the ring for the first time.
  template <class Call>
  __device__ __forceinline__ void begin(const Call& call) {
    if (threadIdx.x % 32 == 0)
      for (int at = 0; at < memory.num_stages && is_left(); ++at) load(call);
    __syncwarp();
  }
  template <class Call>
  __device__ __forceinline__ void finish(const Call& call) {
    if (threadIdx.x % 32 != 0) return;
    while (is_left()) {
      bulk_wait(&memory.head.multiplied[place.stage], place.turn - 1);
      load(call);
    }
  }

 private:
  __device__ __forceinline__ bool is_left() const {
    return part.num_steps > 0 && tile < part.num_tiles;
  }
  template <class Call>
  __device__ __forceinline__ void load(const Call& call) {
    unsigned long long* loaded = &memory.head.loaded[place.stage];
    bulk_expect(loaded, memory.stage_bytes);
    tile_load_once(memory.stage(place.stage), call.weight, part.first_col + step * step_cols,
                   part.first_output(call, tile), loaded);
    place.next(memory.num_stages);
    if (++step == part.num_steps) step = 0, ++tile;
  }
};

// d += tile x^T.
template <class T>
__device__ __forceinline__ void multiply_steps(float (&d)[16], RingPlace& place,
                                               const SeveralMemory& memory, int num_steps) {
  const int group = threadIdx.x / 128;
  int last_stage = 0;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    const unsigned char *x = memory.steps + step * memory.step_bytes,
                        *tile = memory.stage(place.stage) + group * (group_outputs * line_bytes);
    bulk_wait(&memory.head.loaded[place.stage], place.turn);
    products_begin();
#pragma unroll
    for (int at = 0; at < step_cols / 16; ++at)
      multiply_narrow<T>(d, product_operand(tile) + at * 2, product_operand(x) + at * 2);
    products_commit();
    products_wait<1>();
    if (step > 0 && threadIdx.x % 32 == 0) bulk_arrive(&memory.head.multiplied[last_stage]);
    last_stage = place.stage;
    place.next(memory.num_stages);
  }
  products_wait<0>();
  if (num_steps > 0 && threadIdx.x % 32 == 0) bulk_arrive(&memory.head.multiplied[last_stage]);
}
