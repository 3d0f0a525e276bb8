"""Few rows: backward in one launch, and forward that loads weight and bias with the row.

Both change no bit of y and dx.
"""

from __future__ import annotations

import pytest
from kernel_checks import check

from cupynorm.check.cases import Case, random_problem
from cupynorm.check.run import run_kernels
from cupynorm.plan import dispatch, grids
from cupynorm.plan.plans import plan

ONE_LAUNCH = "backward_few.cu"
BACKWARDS = {
    "ring in a block, rows beyond the last": Case("layer_norm", 3, 1024, "bfloat16"),
    "ring of two rows, packs beyond a part": Case("rms_norm", 5, 2888, "bfloat16"),
    "ring of clusters": Case("layer_norm", 2, 9216, "bfloat16", weight="float32", bias="float32"),
    "ring of single elements": Case("layer_norm", 3, 4097, "bfloat16"),
    "ring with a gradient that is added": Case(
        "layer_norm", 3, 4096, "float32", residual=True, dsum=True
    ),
    "lanes of a warp": Case("rms_norm", 37, 128, "float16"),
    "registers of a block": Case("layer_norm", 9, 1000, "float64"),
}


@pytest.mark.parametrize("case", BACKWARDS.values(), ids=list(BACKWARDS))
def test_one_launch_gives_the_bits_of_two(case, where, monkeypatch):
    one = check(case, where)
    sources = []
    launch = where.launch
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "in_one_launch", lambda *given: None)
        patch.setattr(
            type(where),
            "launch",
            lambda self, each, words: (sources.append(each.kernel.source), launch(each, words)),
        )
        two = run_kernels(random_problem(case), where)
    assert sources[-1] == "backward_parameters.cu" and len(sources) == 3
    for name in {"y", "dx", "rstd"}:
        assert one[name].tobytes() == two[name].tobytes(), name


def sources_of(num_rows: int, num_cols: int = 4096, **options: object) -> list[str]:
    made = plan(num_cols, num_rows, direction="backward", device="H200", **options)
    return [launch.kernel.source for launch in made.launches]


def test_few_rows_have_one_launch_backward():
    for num_cols in (128, 1024, 4096, 8192, 16384):
        for num_rows in (1, 16, 64):
            assert sources_of(num_rows, num_cols) == [ONE_LAUNCH], (num_rows, num_cols)
    assert sources_of(16, residual=True) == [ONE_LAUNCH]
    for num_rows, options in (
        (2**16, {}),
        (16, {"strategy": "block"}),
        (16, {"sm_margin": 4}),
        (16, {"num_cols": 100_000}),
        (16, {"weight_dtype": None}),
    ):
        assert sources_of(num_rows, **options)[-1] == "backward_parameters.cu", options


def test_one_launch_counts_its_blocks_its_shared_memory_and_what_it_moves():
    made = plan(4096, 16, direction="backward", device="H200")
    (launch,) = made.launches
    assert made.num_partials == 0 and made.strategy == "block" and made.tile.path == "ring"
    assert launch.num_row_blocks * launch.tile.rows_per_block == 16
    assert launch.block_size == launch.tile.threads_per_row * launch.tile.rows_per_block
    # 2 sums of each of 32 columns in each warp: more than 2 sums of each warp of a row.
    assert launch.smem_bytes == 2 * 4 * 32 * launch.block_size // 32
    assert launch.grid_size - launch.num_row_blocks == 4096 // 32
    assert made.bytes_moved == made.bytes_needed  # the L2 cache has x and dy the second time


FORWARDS = {
    "warp": Case("layer_norm", 5, 1024, "bfloat16"),
    "block": Case("rms_norm", 3, 2880, "float16", weight="float32"),
    "residual": Case("layer_norm", 3, 768, "float32", residual=True),
}


@pytest.mark.parametrize("case", FORWARDS.values(), ids=list(FORWARDS))
def test_early_parameters_change_no_bits(case, where, monkeypatch):
    early = check(case, where)
    tiles = []
    with monkeypatch.context() as patch:
        patch.setattr(
            dispatch,
            "for_few_rows",
            lambda *given: tiles.append(grids.for_few_rows(*given)) or given[3],
        )
        late = run_kernels(random_problem(case), where)
    assert tiles[0].early == 1
    assert early["y"].tobytes() == late["y"].tobytes()


def test_parameters_load_early_where_all_rows_are_resident():
    def early(num_rows: int, num_cols: int = 4096, **options: object) -> int:
        return plan(num_cols, num_rows, device="H200", **options).tile.early

    assert early(1) == early(128) == early(16, 128) == early(16, norm="rms_norm") == 1
    assert early(2**20) == early(2**24, 128) == 0
    none = {"weight_dtype": None, "bias_dtype": None}
    assert early(1, **none) == early(1, strategy="uncached") == 0
    # RMSNorm of narrow rows: for a few turns of resident blocks, more if all packs are inside.
    narrow = {"norm": "rms_norm", "bias_dtype": None}
    assert early(2**17, 128, **narrow) == early(2**15, 200, **narrow) == 1
    assert early(2**15, 128, **narrow) == early(2**20, 128, **narrow) == 0
    assert early(2**17, 200, **narrow) == 0
    assert early(2**17, 128) == early(2**17, 128, residual=True, **narrow) == 0
    assert early(1, out_dtype="float8_e4m3fn") == 0
