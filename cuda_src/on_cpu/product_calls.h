// product_calls.h -- what kernels call: tiles that arrive late, and products of warpgroups
#pragma once
#include "kernel_calls.h"

namespace {

constexpr unsigned rows_of_weight = 256, swizzled_row_bytes = 128;  // or 32

// Bits 7 to 9 of an address are added to bits 4 to 6, without carry; with rows of 32 bytes bit 7 to
// bit 4.
unsigned swizzled(unsigned address, unsigned row_bytes = swizzled_row_bytes) {
  return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
}

float value_of(unsigned short bits, bool is_bfloat16) {
  if (is_bfloat16) {
    const unsigned wide = unsigned(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float size = exponent == 31  ? (fraction ? __builtin_nanf("") : __builtin_inff())
               : exponent == 0 ? __builtin_ldexpf(fraction, -24)
                               : __builtin_ldexpf(1024 + fraction, exponent - 25);
  return bits >> 15 ? -size : size;
}

// 16 columns of an operand of a product: what the descriptor's bits say of it.
struct Operand {
  unsigned start, stride_of_8_rows, row_bytes;
  const unsigned char* smem;

  Operand(Word bits, unsigned num_rows, const Block& block)
      : start((bits & 0x3fff) << 4),
        stride_of_8_rows((bits >> 32 & 0x3fff) << 4),
        row_bytes(bits >> 62 == 3 ? 32 : 128) {
    smem = block.smem - on_cpu::first_smem_address;
    if (!(bits >> 62 & 1) || (bits >> 49 & 7) != 0)
      fail(name_of(*launch.current) +
           " multiplies a tile that is not swizzled by 128 or 32 bytes.");
    const unsigned end = start + (num_rows / 8 - 1) * stride_of_8_rows + 8 * row_bytes;
    if (start < on_cpu::first_smem_address ||
        (end & -1024u) > on_cpu::first_smem_address + launch.smem_bytes)
      fail(name_of(*launch.current) + " multiplies a tile outside of its shared memory.");
  }
  unsigned short at(unsigned row, unsigned col) const {
    unsigned short bits;
    const unsigned address = start + row / 8 * stride_of_8_rows + row % 8 * row_bytes + col * 2;
    memcpy(&bits, smem + swizzled(address, row_bytes), sizeof bits);
    return bits;
  }
};

// The two rows of x that a thread multiplies.
void read_rows(const Product& product, const Thread& thread, unsigned index, float (&a)[2][16]) {
  if (product.a == nullptr) {
    const Operand x(product.x, 64, *thread.block);
    for (unsigned row = 0; row < 2; ++row)
      for (unsigned col = 0; col < 16; ++col)
        a[row][col] = value_of(x.at(thread.index / 32 % 4 * 16 + row * 8 + thread.lane / 4, col),
                               product.is_bfloat16);
    return;
  }
  for (unsigned other = 0; other < 4; ++other) {  // the lanes that share a row
    const Thread& lane = thread.warp->threads[(thread.lane & ~3u) + other];
    for (unsigned word = 0; word < 4; ++word)
      for (unsigned half = 0; half < 2; ++half)
        a[word % 2][word / 2 * 8 + other * 2 + half] =
            value_of(lane.products[index].a[word] >> 16 * half & 0xffff, product.is_bfloat16);
  }
}

void compute(const Product& product, const Thread& thread, unsigned index) {
  const Operand operand(product.weight, rows_of_weight, *thread.block);
  float a[2][16];
  read_rows(product, thread, index, a);
  for (unsigned tile = 0; tile < rows_of_weight / 8; ++tile)
    for (unsigned half = 0; half < 2; ++half) {
      float weight[16];
      for (unsigned col = 0; col < 16; ++col)
        weight[col] =
            value_of(operand.at(tile * 8 + thread.lane % 4 * 2 + half, col), product.is_bfloat16);
      for (unsigned row = 0; row < 2; ++row) {
        float& sum = product.sums[tile * 4 + row * 2 + half];
        float total = product.adds ? sum : 0;
        for (unsigned col = 0; col < 16; ++col) total += a[row][col] * weight[col];
        sum = total;
      }
    }
}

}  // namespace

namespace on_cpu {

void tile_load(void* smem, const unsigned long long* words, int col, int row,
               unsigned long long* own_barrier, unsigned blocks) {
  const auto* matrix = reinterpret_cast<const unsigned char*>(words[0]);
  const long long num_cols = words[1], num_rows = words[2], stride = words[3];
  const unsigned tile_cols = words[4], tile_rows = words[5], row_bytes = tile_cols * 2,
                 bytes = tile_rows * row_bytes;
  Thread& thread = *launch.current;
  if ((row_bytes != swizzled_row_bytes && row_bytes != 32) || smem_address(smem) % 1024 != 0 ||
      block_at(smem, bytes) != thread.block)
    fail(name_of(thread) + text(" loads a tile of %u columns to byte %u of its shared memory.",
                                tile_cols, smem_address(smem) - first_smem_address));
  trace::access(trace::Kind::bulk_load, smem, bytes, __builtin_return_address(0));
  for (unsigned rank = 0; rank < launch.num_blocks; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    std::unique_ptr<unsigned char[]> tile(new unsigned char[bytes]());
    for (unsigned tile_row = 0; tile_row < tile_rows; ++tile_row)
      for (unsigned tile_col = 0; tile_col < tile_cols; ++tile_col)
        if (row + tile_row < num_rows && col + tile_col < num_cols)
          memcpy(tile.get() + swizzled(tile_row * row_bytes + tile_col * 2, row_bytes),
                 matrix + (row + tile_row) * stride + (col + tile_col) * 2, 2);
    auto* to = static_cast<unsigned char*>(cluster_map(smem, rank));
    Block* block;
    const Mbarrier* barrier =
        find_mbarrier(block, static_cast<Word*>(cluster_map(own_barrier, rank)));
    memset(to, 0xff, bytes);  // from here until the wait, nobody may count on the old values
    launch.copies.push_back(
        {to, nullptr, bytes, block, unsigned(barrier - block->barriers.data()), std::move(tile)});
  }
  yield();
}

void multiply(float* sums, const unsigned* a, unsigned long long x, unsigned long long weight,
              bool adds, bool is_bfloat16) {
  Thread& thread = *launch.current;
  thread.products.push_back({sums, a, x, weight, adds, is_bfloat16, thread.num_product_groups});
}

void products_commit() { ++launch.current->num_product_groups; }

void products_wait(unsigned pending_groups) {
  Thread& thread = *launch.current;
  const int first_pending = thread.num_product_groups - int(pending_groups);
  // All lanes have come before any computes, because a row's operands are in four of them.
  warp_call(WarpCall::syncwarp, ~0u, 0, 0, 32);
  unsigned num_done = 0;
  for (; num_done < thread.products.size(); ++num_done) {
    const Product& product = thread.products[num_done];
    if (product.group >= first_pending) break;
    compute(product, thread, num_done);
  }
  warp_call(WarpCall::syncwarp, ~0u, 0, 0, 32);
  thread.products.erase(thread.products.begin(), thread.products.begin() + num_done);
  warp_call(WarpCall::syncwarp, ~0u, 0, 0, 32);
}

}  // namespace on_cpu
