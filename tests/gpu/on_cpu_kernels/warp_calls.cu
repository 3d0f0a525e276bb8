// warp_calls.cu -- y = sum of the x of one warp, with a planted fault or without
enum class Fault {
  none,
  own_lane_missing,
  different_masks,
  half_masks,
  lane_exited,
  lane_never_comes,
  outside_mask,
  width
};

struct WarpSum {
  const double* x;
  double* y;
};

template <Fault fault>
__global__ void warp_sum(WarpSum arguments) {
  const unsigned lane = threadIdx.x % 32;
  unsigned mask = 0xffffffffu;
  if (fault == Fault::own_lane_missing && lane == 3) mask &= ~(1u << 3);
  if (fault == Fault::different_masks && lane >= 16) mask = 0xfffffff0u;
  if (fault == Fault::half_masks && lane >= 16) mask = 0xffff0000u;
  if (fault == Fault::outside_mask) mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  if (fault == Fault::lane_exited && lane == 7) return;
  if (fault == Fault::lane_never_comes && lane == 7) __syncthreads();
  const int width = fault == Fault::width ? 12 : 32;
  double value = arguments.x[threadIdx.x];
  for (int lane_mask = fault == Fault::half_masks ? 8 : 16; lane_mask > 0; lane_mask /= 2)
    value += __shfl_xor_sync(mask, value, lane_mask, width);
  if (lane == 0) arguments.y[threadIdx.x / 32] = value;
}

struct Shuffles {
  long long* y;  // [3, 32]
  long long argument, width;
};

// Every kind of shuffle of the lane's own number, in values of 4 and 8 bytes.
__global__ void shuffles(Shuffles arguments) {
  const int lane = threadIdx.x, argument = arguments.argument, width = arguments.width;
  arguments.y[lane] = __shfl_sync(0xffffffffu, lane, argument, width);
  arguments.y[32 + lane] = __shfl_xor_sync(0xffffffffu, (long long)lane, argument, width);
  const unsigned mask =
      lane < 8 ? 0xffu : ~0xffu;  // two calls of parts of the warp, in either order
  arguments.y[64 + lane] = __all_sync(mask, lane < 8);
}
