"""Options and outputs for which test_bench*.py run the benchmark."""

import numpy as np
from cupynorm.bench.tensors import tensors_of

from cupynorm.bench import runners
from cupynorm.bench.timer import Runner
from cupynorm.bench.truth import Truth, verify

OPTIONS = [
    {},
    {"weight_dtype": "float64"},
    {"residual": True},
    {"zero_centered": True},
    {"out_dtype": "float16"},
]

SCALES = ("given", "tensor", "row", "block")

CAUGHT = [
    ("forward", "y", None),
    ("backward", "dx", None),
    ("both", "dx", None),
    ("forward", "y", "residual"),
    ("forward", "sum", "residual"),
]


def check_that_wrong_outputs_are_found(cell, name):
    tensors, _ = tensors_of(cell, 3)
    truth = Truth(cell, tensors, 0)
    right = runners.prepare("cupynorm", cell, tensors)
    error, wrong = verify(right, truth, rounded_mean=False)
    assert wrong is None and error <= 1

    def spoilt(spoil):
        def outputs(result):
            made = right.outputs(result)
            made[name] = spoil(made[name])
            return made

        return verify(right._replace(outputs=outputs), truth, rounded_mean=False)

    error, wrong = spoilt(lambda output: output * 1.001)
    assert error > 1 and f"{name} is" in wrong and "expected" in wrong
    error, wrong = spoilt(lambda output: output.astype("float64"))
    assert wrong == f"{name} is float64; expected float32"

    first = right.call()
    lazy = Runner(lambda: first, right.outputs)  # nothing is computed: what was poisoned stays
    error, wrong = verify(lazy, truth, rounded_mean=False)
    assert np.isnan(error) and "not every element was written" in wrong
