// vectors.h -- int2, uint4 and their kin, and how to make them
#pragma once

#define CUPYNORM_VECTOR_TYPES(type, name)                          \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };         \
  struct alignas(16) name##4 { type x, y, z, w; };                 \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CUPYNORM_VECTOR_TYPES(int, int)
CUPYNORM_VECTOR_TYPES(unsigned, uint)
CUPYNORM_VECTOR_TYPES(float, float)
CUPYNORM_VECTOR_TYPES(double, double)
#undef CUPYNORM_VECTOR_TYPES
struct alignas(4) ushort2 {
  unsigned short x, y;
};
inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
