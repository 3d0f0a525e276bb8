// cluster_reduce.cuh -- all-reduce over the threads of a cluster that share a row
#pragma once
#include "reduce.cuh"
#include "threads.cuh"

// Each block writes its value to the shared memory of all its peers. Two buffers alternate, as
// in BlockReduce.
template <int threads, int cluster_size, class Compute>
struct ClusterReduce {
  using Block = BlockReduce<threads, Compute>;
  static constexpr int buffer_bytes =
      (2 * Block::max_parts * cluster_size * sizeof(Compute) + 15) / 16 * 16;
  static constexpr int smem_bytes = Block::smem_bytes + buffer_bytes;

  Block block;
  Compute* buffers;
  int turn = 0;

  // A block may write to its peers once they run: the caller synchronises the cluster before the
  // first all().
  __device__ __forceinline__ explicit ClusterReduce(unsigned char* smem)
      : block(smem), buffers(reinterpret_cast<Compute*>(smem + Block::smem_bytes)) {}

  template <class Value>
  __device__ __forceinline__ Value all(Value value) {
    value = block.all(value);
    Compute* buffer = buffers + turn * Block::max_parts * cluster_size;
    turn ^= 1;
    if (threadIdx.x < cluster_size) {
      Compute* peer = cluster_map(buffer, threadIdx.x);
      const int rank = cluster_rank();
#pragma unroll
      for (int at = 0; at < Value::size; ++at) peer[at * cluster_size + rank] = value.part[at];
    }
    cluster_sync();
    const int source = threadIdx.x % cluster_size;
#pragma unroll
    for (int at = 0; at < Value::size; ++at) value.part[at] = buffer[at * cluster_size + source];
    return repeated_reduce<cluster_size>(value);
  }
};
