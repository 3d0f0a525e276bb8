"""8-bit floats of torch byte for byte, recipes of scaling, products, and fp8_autocast.

Recipes are compared with delayed_scaling.py, a second implementation.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from cupynorm.reference import fp8 as reference
from delayed_scaling import Machine

import cupynorm

torch = pytest.importorskip("torch")
from cupynorm.nn import amaxes, autocast, fp8, products, quantization, recipes  # noqa: E402
from cupynorm.nn.fp8 import Scales  # noqa: E402
from cupynorm.nn.products import Factor  # noqa: E402
from cupynorm.nn.recipes import BlockScaling, CurrentScaling, DelayedScaling, Format  # noqa: E402

NAMES = {"float8_e4m3fn": recipes.E4M3, "float8_e5m2": recipes.E5M2}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draw(shape=(130, 300), seed=0) -> np.ndarray:
    """Rows of scales from 1e-3 to 1e3, with a row of zeros, an infinity and a row of denormals."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape) * 10.0 ** generator.integers(-3, 4, (shape[0], 1))
    values[3], values[5, 7], values[8] = 0.0, np.inf, 1e-44
    return values.astype(np.float32)


def raw(data: torch.Tensor) -> np.ndarray:
    return data.view(torch.uint8).cpu().numpy()


def record(scales, at, x):
    """Records the amax of x, as a step that quantises x does."""
    quantization.quantize(x.reshape(1, -1), scales.scale[at], recipes.E4M3, amax=scales.amax(at))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_those_of_the_reference(device, name):
    values, dtype = draw(), NAMES[name]
    x = torch.from_numpy(values).to(device)
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(
        raw(quantization.encode(torch.from_numpy(every[~np.isnan(every)]).to(device), 1.0, dtype)),
        reference.encode(every[~np.isnan(every)], name),
    )
    nans = raw(quantization.encode(torch.tensor([math.nan, -math.nan], device=device), 1.0, dtype))
    assert np.isnan(reference.decode(nans, name)).all()
    scale = torch.tensor(3.7, device=device)
    made, expected = (
        quantization.quantize(x, scale, dtype, transpose=True),
        reference.quantize(values, name, 3.7),
    )
    np.testing.assert_array_equal(raw(made.data), expected.data)
    np.testing.assert_array_equal(raw(made.transposed), expected.data.T)
    assert made.scale_inv.item() == expected.scale_inv and made.transposed.is_contiguous()
    assert quantization.amax_of(x).item() == expected.amax
    for power_of_two in (False, True):
        data, scale_inv = quantization.quantize_rows(x, dtype, power_of_two=power_of_two)
        expected = reference.quantize_rows(values, name, power_of_two=power_of_two)
        np.testing.assert_array_equal(raw(data), expected.data)
        np.testing.assert_array_equal(scale_inv.cpu().numpy(), expected.scale_inv)
        for block_rows in (1, 128):
            options = {"block_rows": block_rows, "power_of_two": power_of_two}
            made = quantization.quantize_blocks(x, dtype, transpose=True, **options)
            for got, of_got, expected in (
                (made.data, made.scale_inv, reference.quantize_blocks(values, name, **options)),
                (
                    made.transposed,
                    made.transposed_scale_inv,
                    reference.quantize_blocks(values.T.copy(), name, **options),
                ),
            ):
                np.testing.assert_array_equal(raw(got), expected.data)
                np.testing.assert_array_equal(of_got.cpu().numpy(), expected.scale_inv)
            truth = reference.dequantize(
                reference.quantize_blocks(values, name, **options), name, block_rows=block_rows
            )
            # One float32 product of numbers whose product is exact in float64.
            np.testing.assert_allclose(
                made.dequantize(torch.float64).cpu().numpy(), truth, rtol=2.0**-24, atol=2.0**-149
            )
    data, scale_inv = quantization.quantize_mxfp8(x, dtype)
    expected = reference.quantize_mxfp8(values, name)
    np.testing.assert_array_equal(raw(data), expected.data)
    np.testing.assert_array_equal(scale_inv.cpu().numpy(), expected.scale_inv)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_the_product_of_16_bit_values_and_a_scale_is_float32(dtype):
    """A product rounded to 16 bits first would give other 8-bit floats."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((200, 300))).to(dtype)
    scale = torch.tensor(3.7)
    expected = reference.quantize(x.float().numpy(), "float8_e4m3fn", scale.numpy()).data
    np.testing.assert_array_equal(raw(quantization.encode(x, scale, recipes.E4M3)), expected)
    assert (raw((x * scale).to(recipes.E4M3)) != expected).any()


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_those_of_the_reference(name):
    amaxes = np.concatenate(
        [
            np.array([0.0, 1.0, 3.0, 448.0, 1e-3, 1e-38, 1e-45, 3e38, np.inf, np.nan], np.float32),
            np.abs(np.random.default_rng(0).standard_normal(1000)).astype(np.float32),
        ]
    )
    for options in ({}, {"power_of_two": True}, {"smallest_amax": 0.5}):
        got = quantization.scale_of(torch.from_numpy(amaxes), NAMES[name], **options)
        np.testing.assert_array_equal(got.numpy(), reference.scale_of(amaxes, name, **options))


def test_a_quantised_tensor():
    x = torch.linspace(-3, 3, 40, dtype=torch.bfloat16).reshape(8, 5)
    made = quantization.quantize(x, torch.tensor(100.0), recipes.E4M3)
    assert (
        made.shape == (8, 5)
        and made.transposed is None
        and made.dequantize().dtype == torch.bfloat16
    )
    assert (made.dequantize(torch.float32) - x.float()).abs().max() <= 3 * 2.0**-4
    assert (
        repr(made)
        == "QuantizedTensor(shape=(8, 5), data=torch.float8_e4m3fn, dtype=torch.bfloat16, "
        "block_rows=None)"
    )
    assert quantization.amax_of(x[:0]).item() == 0.0 and quantization.amax_of(
        x[:, :0], 1
    ).shape == (8,)


@pytest.mark.parametrize("shape", [(256, 128), (130, 128), (300, 8), (128, 256), (257, 384)])
@pytest.mark.parametrize("block_rows", [1, 128])
def test_blocks_as_wide_as_a_row_and_wider(block_rows, shape):
    values = draw(shape)
    made = quantization.quantize_blocks(
        torch.from_numpy(values), recipes.E4M3, block_rows=block_rows
    )
    expected = reference.quantize_blocks(values, "float8_e4m3fn", block_rows=block_rows)
    truth = reference.dequantize(expected, "float8_e4m3fn", block_rows=block_rows)
    np.testing.assert_allclose(
        made.dequantize(torch.float64).numpy(), truth, rtol=2.0**-24, atol=2.0**-149
    )


@pytest.mark.parametrize(
    "rule",
    (
        quantization.Rule(),
        quantization.Rule(power_of_two=True),
        quantization.Rule(smallest_amax=7.0),
    ),
    ids=str,
)
@pytest.mark.parametrize("largest", (3.0, 0.0, 3e-39, float("inf"), float("nan")))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_a_matrix_by_the_scale_of_its_own_amax(dtype, largest, rule, anywhere):
    """Bytes and scale are those of the reference, with and without sums over rows."""
    values = np.clip(np.random.default_rng(0).standard_normal((130, 40)), -2.5, 2.5)
    x = torch.from_numpy(values * (largest / 3 if largest < 3 else 1)).to(dtype)
    x[5, 7] = largest
    values, name = x.float().numpy(), "float8_e4m3fn"
    options = {"smallest_amax": rule.smallest_amax, "power_of_two": rule.power_of_two}
    truth = reference.quantize(
        values, name, reference.scale_of(reference.amax(values), name, **options)
    )
    x = x.to(anywhere)
    beside, sums = quantization.quantize_and_sum(x, recipes.E4M3, torch.float32, rule=rule)
    for made in (quantization.quantize_current(x, recipes.E4M3, rule, transpose=True), beside):
        # The byte of a NaN is not compared, because its sign may differ.
        same = np.arange(values.size).reshape(values.shape) != (
            5 * 40 + 7 if np.isnan(largest) else -1
        )
        np.testing.assert_array_equal(raw(made.data)[same], truth.data[same])
        np.testing.assert_array_equal(raw(made.transposed).T[same], truth.data[same])
        assert made.scale_inv.cpu().numpy() == np.float32(truth.scale_inv)
    if np.isfinite(largest):
        wide = values.astype(np.float64)
        # Each addition rounds, and a GPU flushes its denormal operands and results.
        allowed = len(wide) * (2.0**-24 * abs(wide).sum(0) + 2.0**-125)
        assert (abs(sums.cpu().numpy() - wide.sum(0)) <= allowed).all()


# Recipes.


@pytest.mark.parametrize("rule", ("max", "most_recent"))
@pytest.mark.parametrize("length, margin", ((1, 0), (2, 1), (4, 0), (16, 3), (300, -2), (1024, 0)))
@pytest.mark.parametrize("device", (*DEVICES, "kernels"))
def test_fifty_steps_give_the_scales_of_the_second_implementation(
    device, length, margin, rule, request
):
    launched = request.getfixturevalue("kernels") if device == "kernels" else None
    device = "cpu" if device == "kernels" else device
    generator = np.random.default_rng([length, margin + 4])
    dtypes = (recipes.E4M3, recipes.E5M2, recipes.E4M3)
    recipe = DelayedScaling(margin, amax_history_len=length, amax_compute_algo=rule)
    scales = Scales(dtypes, length, torch.device(device))
    machines = [Machine(recipes.LARGEST[dtype], length, margin, rule) for dtype in dtypes]
    places = scales.scale.data_ptr(), scales.amax_history.data_ptr()
    changed = 0
    for _ in range(50):
        amaxes = np.abs(generator.standard_normal(3) * 10.0 ** generator.integers(-4, 5, 3)).astype(
            np.float32
        )
        odd = generator.random(3)
        for bound, value in ((0.10, 0.0), (0.17, np.inf), (0.24, np.nan), (0.30, 1e-42)):
            amaxes[(odd < bound) & (odd >= bound - 0.07)] = value
        for at, (machine, amax) in enumerate(zip(machines, amaxes)):
            if (
                at != 2 or generator.random() < 0.5
            ):  # the last tensor is used in about half the steps
                record(scales, at, torch.tensor([[-amax, amax / 2]], device=device))
            else:
                amax = 0.0
            machine.step(amax)
        before = scales.scale.clone()
        scales.update(recipe)
        changed += int((scales.scale != before).any())
        assert scales.scale.tolist() == [machine.scale for machine in machines]
        expected = np.array([machine.history() for machine in machines], np.float32).T
        np.testing.assert_array_equal(scales.amax_history.cpu().numpy(), expected)
    assert changed > 3 and places == (scales.scale.data_ptr(), scales.amax_history.data_ptr())
    assert launched is None or "update_scales.cu" in [launch.kernel.source for launch in launched]


def test_a_tensor_used_twice_in_a_step_records_the_larger_amax():
    scales = Scales((recipes.E4M3,), 3, torch.device("cpu"))
    for value in (2.0, 8.0, 4.0):
        record(scales, 0, torch.full((3,), value))
    scales.update(DelayedScaling(amax_history_len=3))
    assert scales.scale.item() == 448 / 8 and scales.amax_history.flatten().tolist() == [
        0.0,
        0.0,
        8.0,
    ]


def test_callables_of_a_recipe():
    seen = []

    def amax(history):
        seen.append(history.clone())
        return history.mean(0)

    def scale(amax, scale, fp8_max, recipe):
        assert recipe.margin == 2 and fp8_max.tolist() == [448.0, 57344.0]
        return fp8_max / amax / 2

    recipe = DelayedScaling(
        2, amax_history_len=2, amax_compute_algo=amax, scaling_factor_compute_algo=scale
    )
    scales = Scales((recipes.E4M3, recipes.E5M2), 2, torch.device("cpu"))
    for at in range(2):
        record(scales, at, torch.tensor([4.0]))
    scales.update(recipe)
    assert seen[0].tolist() == [[4.0, 4.0], [0.0, 0.0]] and scales.scale.tolist() == [
        112.0,
        14336.0,
    ]


def test_options_that_recipes_refuse():
    assert DelayedScaling() == DelayedScaling(0, Format.HYBRID, 1024, "max", None, True)
    assert CurrentScaling() == CurrentScaling(
        Format.HYBRID, 0.0, False
    ) and BlockScaling() == BlockScaling(Format.E4M3, True)
    assert Format.HYBRID.value == (recipes.E4M3, recipes.E5M2) and Format.E4M3.value == (
        recipes.E4M3,
        recipes.E4M3,
    )
    for make, error, sentence in (
        (
            lambda: DelayedScaling(amax_history_len=0),
            ValueError,
            "amax_history_len is 0; expected 1 or more",
        ),
        (
            lambda: DelayedScaling(amax_history_len=1.5),
            TypeError,
            "amax_history_len is 1.5; expected an int, 1 or more",
        ),
        (lambda: DelayedScaling(margin="a"), TypeError, "margin is 'a'; expected a finite number"),
        (
            lambda: DelayedScaling(margin=True),
            TypeError,
            "margin is True; expected a finite number",
        ),
        (
            lambda: DelayedScaling(margin=None),
            TypeError,
            "margin is None; expected a finite number",
        ),
        (
            lambda: DelayedScaling(margin=float("nan")),
            TypeError,
            "margin is nan; expected a finite number",
        ),
        (lambda: DelayedScaling(margin=-2000), ValueError, "margin is -2000; expected -126 to 126"),
        (lambda: DelayedScaling(margin=10**400), ValueError, "margin is 1000"),
        (
            lambda: DelayedScaling(reduce_amax="no"),
            TypeError,
            "reduce_amax is 'no'; expected True or False",
        ),
        (
            lambda: DelayedScaling(scaling_factor_compute_algo=3),
            TypeError,
            "algo is 3; expected None or a callable",
        ),
        (
            lambda: CurrentScaling(power_of_two="no"),
            TypeError,
            "power_of_two is 'no'; expected True or False",
        ),
        (
            lambda: BlockScaling(power_of_two=1),
            TypeError,
            "power_of_two is 1; expected True or False",
        ),
        (
            lambda: autocast.fp8_autocast(CurrentScaling()).__enter__(),
            TypeError,
            "enabled is a CurrentScaling; expected True or False, and a recipe as recipe=",
        ),
        (
            lambda: DelayedScaling(amax_compute_algo="mean"),
            ValueError,
            "amax_compute_algo is 'mean'",
        ),
        (
            lambda: DelayedScaling(fp8_format="E5M2"),
            TypeError,
            "fp8_format is 'E5M2'; expected Format.E4M3 or Format.HYBRID",
        ),
        (
            lambda: CurrentScaling(amax_epsilon=-1.0),
            ValueError,
            "amax_epsilon is -1.0; expected 0 or more",
        ),
        (
            lambda: CurrentScaling(amax_epsilon=float("nan")),
            ValueError,
            "amax_epsilon is nan; expected 0 or more",
        ),
        (
            lambda: CurrentScaling(amax_epsilon=1e39),
            ValueError,
            "1e\\+39; expected 0 or more, and no more than float32 holds",
        ),
        (
            lambda: CurrentScaling(amax_epsilon="0"),
            TypeError,
            "amax_epsilon is '0'; expected a number that is 0 or more",
        ),
        (
            lambda: autocast.fp8_autocast(recipe="delayed").__enter__(),
            TypeError,
            "recipe is a str; expected DelayedScaling",
        ),
    ):
        with pytest.raises(error, match=sentence):
            make()


def test_regions_may_end_out_of_order():
    """Regions of several threads may end in any order."""
    first, second = (
        autocast.fp8_autocast(recipe=recipe) for recipe in (CurrentScaling(), BlockScaling())
    )
    with first:
        second.__enter__()
    assert autocast.active().recipe == BlockScaling()
    second.__exit__(None, None, None)
    assert autocast.active() is None


def test_reduce_amax_takes_the_largest_of_all_ranks(monkeypatch):
    """Both ranks take the larger amax. A single rank, or reduce_amax=False, makes no all_reduce."""

    class Group:
        pass

    asked, group = [], Group()

    def all_reduce(tensor, op, group):
        asked.append((op, group))
        is_amaxes = len(tensor) % amaxes.SLOT_SIZE == 0
        if is_amaxes:
            tensor.copy_(torch.maximum(tensor, torch.tensor([7.0])))

    for name, value in (
        ("is_initialized", lambda: True),
        ("get_world_size", lambda group: 2),
        ("get_backend", lambda group: "gloo"),
        ("all_reduce", all_reduce),
    ):
        monkeypatch.setattr(torch.distributed, name, value)
    for recipe, expected in (
        (DelayedScaling(amax_history_len=2), 64.0),
        (DelayedScaling(amax_history_len=2, reduce_amax=False), 448.0),
    ):
        scales = Scales((recipes.E4M3,), 2, torch.device("cpu"))
        record(scales, 0, torch.ones(1))
        with cupynorm.fp8_autocast(recipe=recipe, group=group):
            used = autocast.UsedScales(scales, recipe, group)
            autocast.active().used[2100, 0] = used
        assert scales.scale.item() == expected
    # Two comparisons of the ranks' layers come before a group's first.
    assert asked == 3 * [(torch.distributed.ReduceOp.MAX, group)]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    with cupynorm.fp8_autocast(recipe=DelayedScaling(amax_history_len=2)):
        pass
    assert len(asked) == 3


def filled(length: int) -> Scales:
    scales = Scales((recipes.E4M3, recipes.E5M2), length, torch.device("cpu"))
    recipe = DelayedScaling(amax_history_len=length)
    for step in range(1, 6):
        for at in range(2):
            record(scales, at, torch.tensor([step * 10.0**at]))
        scales.update(recipe)
    return scales


def test_a_history_of_another_length():
    longer = filled(4)
    assert longer.amax_history[:, 0].tolist() == [0.0, 3.0, 4.0, 5.0]
    longer.resize(6)
    assert longer.amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 3.0, 4.0, 5.0]
    for length, kept in ((3, [0.0, 4.0, 5.0]), (2, [0.0, 5.0]), (1, [0.0])):
        longer.resize(length)
        assert longer.amax_history[:, 0].tolist() == kept and longer.amax_history.shape == (
            length,
            2,
        )


def test_states_are_packed_as_bytes_without_pickle():
    states = {"forward": filled(4), "backward": filled(2)}
    packed = fp8.pack(states)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert bytes(packed.numpy()).startswith(
        b'cupynorm fp8 state 1\n{"forward": [4, 2], "backward": [2, 2]}\n'
    )
    found = fp8.unpack(packed)
    assert list(found) == ["forward", "backward"]
    for name, (scale, history) in found.items():
        assert torch.equal(scale, states[name].scale) and torch.equal(
            history, states[name].amax_history
        )
    for cut in (packed[:-8], packed[:-3], packed[:40]):
        with pytest.raises(
            ValueError, match="the fp8 state in a state dict has [0-9]+ bytes of numbers; expected"
        ):
            fp8.unpack(cut)
    assert fp8.pack({}).numel() == 0 and fp8.unpack(fp8.pack({})) == {} and fp8.unpack(None) == {}
    for foreign in (torch.tensor([128, 4, 149], dtype=torch.uint8), {"scale": 1}):
        with pytest.warns(UserWarning, match="is not cupynorm's"):
            assert fp8.unpack(foreign) == {}


# Products.


@pytest.mark.parametrize(
    "shape", ((5, 7, 3), (16, 32, 48), (17, 200, 33), (1, 1, 1), (300, 260, 130)), ids=str
)
@pytest.mark.parametrize(
    "kinds", ((recipes.E4M3, recipes.E4M3), (recipes.E5M2, recipes.E4M3)), ids=str
)
@pytest.mark.parametrize("blocks", (False, True), ids=("tensors", "blocks"))
@pytest.mark.parametrize("device", DEVICES)
def test_products_of_any_extents_are_within_bounds(device, blocks, kinds, shape):
    """Products of 8-bit values are exact. float32 sums and the last rounding err."""
    num_rows, depth, num_cols = shape
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(rows, depth, generator=generator).to(device) for rows in (num_rows, num_cols)
    )
    bias = torch.randn(num_cols, generator=generator).to(device)
    if blocks:
        a, b = (
            quantization.quantize_blocks(a, kinds[0]),
            quantization.quantize_blocks(b, kinds[1], block_rows=128),
        )
    else:
        a, b = (
            quantization.quantize(x, quantization.scale_of(quantization.amax_of(x), kind), kind)
            for x, kind in zip((a, b), kinds)
        )
    wide = [each.dequantize(torch.float64).cpu().numpy() for each in (a, b)]
    for out_dtype, half_ulp in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)):
        for added in (None, bias.to(out_dtype)):
            y = products.multiply(a, b, out_dtype, bias=added)
            assert y.dtype == out_dtype and y.shape == (num_rows, num_cols)
            truth = wide[0] @ wide[1].T + (0.0 if added is None else added.double().cpu().numpy())
            sizes = np.abs(wide[0]) @ np.abs(wide[1]).T + (
                0.0 if added is None else added.abs().double().cpu().numpy()
            )
            # Tensor cores truncate where others round: an ulp per addition.
            ulps = 1 if device == "cuda" else 0.5
            allowed = (depth + 6) * ulps * 2.0**-23 * sizes + 2 * half_ulp * np.abs(truth)
            if device == "cuda" and not blocks:
                # Hopper's tensor cores keep 13 bits below the largest term of each step. Slow
                # accumulation adds up every 128 terms in float32.
                allowed = allowed + 2.0**-13 * sizes
            assert (np.abs(y.double().cpu().numpy() - truth) <= allowed).all()


@pytest.mark.parametrize("shape", ((5, 7, 3), (16, 32, 48), (17, 200, 33), (1, 1, 1)), ids=str)
def test_operands_of_torch_s_product(monkeypatch, shape):
    """The code for a GPU, run on the CPU, pads to multiples of 16 and gives the same products."""
    num_rows, depth, num_cols = shape
    plain, seen = torch._scaled_mm, []

    def scaled_mm(a, b, *, scale_a, scale_b, use_fast_accum, **options):
        assert a.shape[1] % 16 == 0 and b.shape[0] == a.shape[1] and b.shape[1] % 16 == 0
        assert (
            a.is_contiguous() and b.t().is_contiguous() and scale_a.numel() == scale_b.numel() == 1
        )
        assert (
            options["bias"] is None
            or options["bias"].dtype == options["out_dtype"] != torch.float32
        )
        seen.append((use_fast_accum, options["bias"] is not None))
        try:
            return plain(a, b, scale_a=scale_a, scale_b=scale_b, **options)
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"this torch multiplies no 8-bit floats on the CPU: {error}")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    generator = torch.Generator().manual_seed(0)
    a, b = (
        quantization.quantize(
            torch.randn(rows, depth, generator=generator), torch.tensor(50.0), recipes.E4M3
        )
        for rows in (num_rows, num_cols)
    )
    bias = torch.randn(num_cols, generator=generator)
    for out_dtype, half_ulp in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)):
        for added in (None, bias.to(out_dtype)):
            y = products.multiply_scaled(a, b, out_dtype, bias=added, fast=True)
            expected = products.multiply(a, b, torch.float32, bias=added)
            assert y.shape == expected.shape and y.dtype == out_dtype and y.is_contiguous()
            sizes = a.dequantize().abs() @ b.dequantize().abs().t()
            assert (
                (y.float() - expected).abs()
                <= 2 * half_ulp * expected.abs()
                + (depth + 6) * 2.0**-23 * (sizes + bias.abs())
                + half_ulp * bias.abs()
            ).all()
    assert seen == [(True, False), (True, num_cols % 16 == 0), (True, False), (True, False)]


def test_an_empty_product_is_zero():
    empty = torch.empty(0, 4).to(recipes.E4M3)
    other, one = torch.ones(3, 4).to(recipes.E4M3), torch.tensor(1.0)
    assert products.multiply(Factor(empty, one), Factor(other, one), torch.float32).shape == (0, 3)
    of_nothing = Factor(other.t()[:0].t(), one), Factor(torch.empty(2, 0).to(recipes.E4M3), one)
    nothing = products.multiply(*of_nothing, torch.float32)
    assert nothing.shape == (3, 2) and not nothing.any()


# fp8_autocast.


def test_regions():
    assert autocast.active() is None
    with cupynorm.fp8_autocast():
        assert autocast.active().recipe == DelayedScaling()
        with cupynorm.fp8_autocast(recipe=BlockScaling()):
            assert autocast.active().recipe == BlockScaling()
            with cupynorm.fp8_autocast(enabled=False):
                assert autocast.active() is None
        assert autocast.active().recipe == DelayedScaling()
    with cupynorm.fp8_autocast(False, CurrentScaling()):
        assert autocast.active() is None

    @cupynorm.fp8_autocast(recipe=CurrentScaling())
    def inside():
        return autocast.active().recipe

    assert inside() == inside() == CurrentScaling() and autocast.active() is None
    with pytest.raises(KeyError), cupynorm.fp8_autocast():
        raise KeyError
    assert autocast.active() is None


def test_actions_at_the_end_of_the_outermost_region():
    ran = []

    class Seen:
        def update(self, recipe):
            ran.append(recipe)

        def forget(self):
            ran.append("forgotten")

    recipe = DelayedScaling()
    with cupynorm.fp8_autocast():
        with cupynorm.fp8_autocast(recipe=CurrentScaling()):
            for _ in range(2):
                autocast.active().used[0, 0] = autocast.UsedScales(Seen(), recipe, "group")
        assert not ran
    assert ran == [recipe]
    with torch.no_grad(), cupynorm.fp8_autocast():
        autocast.active().used[0, 0] = autocast.UsedScales(Seen(), recipe, None)
    assert len(ran) == 1
    with pytest.raises(KeyError), cupynorm.fp8_autocast():
        autocast.active().used[0, 0] = autocast.UsedScales(Seen(), recipe, None)
        raise KeyError
    assert ran[1:] == ["forgotten"]


@pytest.mark.gpu
def test_a_step_of_delayed_scaling_in_a_cuda_graph():
    recipe, length = DelayedScaling(amax_history_len=3), 3
    scales, plain = (Scales((recipes.E4M3,), length, torch.device("cuda")) for _ in range(2))
    x = torch.ones(64, 64, device="cuda")

    def step(scales):
        record(scales, 0, x)
        data = quantization.encode(x, scales.scale[0], recipes.E4M3)
        scales.update(recipe)
        return data

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(Scales((recipes.E4M3,), length, torch.device("cuda")))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(scales)
    for size in (3.0, 0.5, 100.0, 2.0):
        x.fill_(size)
        graph.replay()
        assert torch.equal(captured.view(torch.uint8), step(plain).view(torch.uint8))
        assert torch.equal(scales.scale, plain.scale) and torch.equal(
            scales.amax_history, plain.amax_history
        )
