// tile.cu -- a struct as template argument, a shadow of the kernels' own tile
struct Tile {
  int pack_size, threads_per_row;
};

struct Counts {
  long long* y;
};

template <typename Value, Tile tile>
__global__ void __launch_bounds__(tile.threads_per_row)
    tile_sizes(const __grid_constant__ Counts arguments) {
  if (threadIdx.x == 0) atomicAdd(arguments.y, (long long)(tile.pack_size * sizeof(Value)));
}
