"""Where kernels round: NVIDIA's compilers choose nothing by themselves, so no GPU is needed.

A product and a sum may become one operation, which rounds once. Which of two products that is can
differ from tile to tile, and then the bits of a row would depend on the number of rows.
"""

from __future__ import annotations

import re

import pytest
from nvrtc_here import needs_nvrtc

from cupynorm.dispatch.instances import Kernel
from cupynorm.gpu import nvrtc
from cupynorm.plans import plan

_REGISTERS = r"(%\w+), (%\w+), (%\w+)"


def ptx_of(kernel: Kernel) -> list[str]:
    """Lines of the code that ptxas assembles."""
    from cupy.cuda import get_cuda_path
    from cupy_backends.cuda.libs import nvrtc as library

    program = library.createProgram(nvrtc.source(kernel), "kernel.cu", (), ())
    try:
        library.addNameExpression(program, kernel.name_expression)
        options = [*nvrtc.options(), "-ftz=true", "-arch=compute_90"]
        library.compileProgram(program, [*options, *nvrtc._include_options(get_cuda_path())])
        code = library.getPTX(program)
    finally:
        library.destroyProgram(program)
    text = code if isinstance(code, str) else code.decode()
    return [line.strip() for line in text.splitlines()]


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("num_rows", (5, 10**6))
@pytest.mark.parametrize(
    "num_cols, dtype", [(24, "float32"), (128, "float32"), (32, "float64"), (256, "bfloat16")]
)
def test_x_hat_is_rounded_at_the_same_places_in_all_tiles(num_cols, dtype, num_rows):
    """Few rows have more lanes than many, and so another kernel."""
    code = ptx_of(plan(num_cols, num_rows, dtype=dtype, device="H200").launches[0].kernel)
    # ptxas may fuse a product without .rn with a sum.
    products = {
        found[1] for line in code if (found := re.match(r"mul\.(?:ftz\.)?f\d+\s+(%\w+)", line))
    }
    sums = [re.match(rf"(?:add|sub)\.(?:ftz\.)?f\d+\s+{_REGISTERS}", line) for line in code]
    assert products and any(sums)
    assert not [found[0] for found in sums if found and products & {found[2], found[3]}]
    # NVRTC must not fuse the shift, but (x - mean) * rstd.
    rounded = [re.match(rf"mul\.rn\.(?:ftz\.)?f\d+\s+{_REGISTERS}", line) for line in code]
    shift = [found for found in rounded if found][-1][1]
    uses = [line for line in code if re.search(rf", {shift}\b", line)]
    assert uses and all(re.match(rf"fma\.rn\.\S+\s+{_REGISTERS}, {shift};", line) for line in uses)
