"""The gradient check: kernels, or a user's own functions, against float64.

Reading order: gradient_check (what users call), cases and trials (the data), run and kernels (how
the kernels run), callables (how functions run), allowed (the bounds), results (the verdict).

Why a tensor is off: diagnosis (in which order causes are tried), mistakes (wrong formulas), judged
(whether one explains the numbers), then fits of rows, columns, terms and sums to the numbers.
"""
