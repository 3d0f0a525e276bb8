// types.cuh -- type traits: is_same, and the type of the arithmetic
#pragma once

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// The type of the arithmetic: float for every element type but double.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};

// The wider type of arithmetic of two element types; void counts as none.
template <class A, class B>
struct WiderOf {
  using type = typename ComputeOf<A>::type;
};
template <class A>
struct WiderOf<A, double> {
  using type = double;
};

// A, or B if A is void.
template <class A, class B>
struct Otherwise {
  using type = A;
};
template <class B>
struct Otherwise<void, B> {
  using type = B;
};

// Stands for a value that an instance does not need.
struct Nothing {};

// A if `first`, else B.
template <bool first, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};
