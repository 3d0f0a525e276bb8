"""Norms and products in one kernel, for every_kernel.py: problems, runs and what judges them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent / "kernels"))  # every_kernel.py is also run by itself

import few_cases
import product_cases

from cupynorm.verify.results import Finding


class Product(NamedTuple):
    """sizes: num_rows, in_features, out_features. kind: "folded", "few" or "few, residual".

    options: of product_cases.multiply.
    """

    kind: str
    sizes: tuple[int, int, int]
    dtype: str
    centered: bool = True
    options: tuple[tuple[str, int], ...] = ()

    @property
    def num_products(self) -> int:
        """In elements of norms that take as long under a sanitizer."""
        num_rows, in_features, out_features = self.sizes
        return in_features * (num_rows + out_features) * (8 if self.kind == "folded" else 1)


def products() -> list[Product]:
    """Ragged tiles, clusters of one and two blocks, several tiles and strips a block; few rows."""
    tiles = (130, 200, 264)
    every = [
        Product("folded", tiles, dtype, centered)
        for dtype in ("bfloat16", "float16")
        for centered in (True, False)
    ]
    every.append(Product("folded", tiles, "bfloat16", True, (("cluster_size", 1),)))
    every.append(
        Product(
            "folded", (300, 136, 520), "bfloat16", True, (("strips_at_a_time", 2), ("grid_size", 2))
        )
    )
    return every + [
        Product(kind, sizes, dtype, centered)
        for kind in ("few", "few, residual")
        for sizes, centered in (((2, 1288, 43), True), ((1, 2056, 17), False))
        for dtype in ("bfloat16", "float16")
    ]


def run_product(product: Product, where: Any) -> tuple[Any, Any, Any]:
    """The problem, its folded weight (None for few rows), and what the kernel makes."""
    problem = product_cases.draw(product.sizes, product.dtype, centered=product.centered)
    if product.kind == "folded":
        folded = product_cases.fold(problem, where)
        return (
            problem,
            folded,
            product_cases.multiply(problem, folded, where, **dict(product.options)),
        )
    parts = None
    if product.kind.endswith("residual"):
        problem, parts = few_cases.split(problem)
    return problem, None, few_cases.run(problem, where, num_sms=8, parts=parts)


def judge_product(product: Product, problem: Any, folded: Any, found: Any) -> list[Finding]:
    """The largest errors, in units of what is allowed."""
    if folded is None:
        over = few_cases.excess(problem, found)
    else:
        over = product_cases.excess(problem, folded, found)
    return [
        Finding(str(product), name, error, (), error, 0.0, 1.0, int(not error <= 1))
        for name, error in over.items()
    ]
