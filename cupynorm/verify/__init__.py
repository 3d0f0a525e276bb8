"""The gradient check: kernels, functors, or a user's own functions, against float64.

Reading order: check, check_function, check_functor (what users call), cases and traps (the data),
kernels (how they run), bounds (what is allowed), results (the verdict).

Why a tensor is off: diagnosis.
"""
