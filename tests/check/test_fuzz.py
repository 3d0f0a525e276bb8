"""The fuzzer: it finds each kind of fault that it looks for, and draws everything it promises."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cupynorm import __main__ as main
from cupynorm.check.allowed import expect
from cupynorm.check.cases import Case
from cupynorm.check.fuzz import Draw, command, judge, rerun
from cupynorm.check.fuzz.draws import (
    OUTPUTS,
    PARAMETERS,
    PER_CASE,
    ROUTES,
    VALUES,
    draw,
    possible,
    problem_of,
)
from cupynorm.check.fuzz.smaller import as_python, smallest
from cupynorm.check.kernels import CpuMachine
from cupynorm.check.placement import GUARD_BYTES, LAYOUTS
from cupynorm.check.quantized import How
from cupynorm.dtypes import decode, encode
from cupynorm.gpu import on_cpu
from cupynorm.plan.problem import SCALINGS, Tile
from cupynorm.plan.strategies import STRATEGIES

PLAIN = Draw(Case("layer_norm", 5, 96, "float32"), seed=7)

# Draws.


def test_a_draw_is_a_function_of_seed_and_index():
    assert draw(1, 5, "cpu") == draw(1, 5, "cpu")
    assert len({repr(draw(1, index, "cpu")) for index in range(50)}) == 50
    assert draw(1, 5, "cpu") != draw(2, 5, "cpu")
    first, second = problem_of(draw(1, 5, "cpu")), problem_of(draw(1, 5, "cpu"))
    np.testing.assert_array_equal(first.x, second.x)


def test_everything_is_drawn():
    draws = [draw(0, index, "gpu") for index in range(0, 768000, 241)]
    assert {each.values for each in draws} == set(VALUES)
    assert {each.route for each in draws} == set(ROUTES)
    assert {each.case.strategy for each in draws} == {None, *STRATEGIES}
    laid_out = {(name, layout) for each in draws for name, layout in each.layouts.items()}
    assert laid_out == {
        *((name, layout) for name in ("x", "residual", "dy", "dsum") for layout in LAYOUTS[1:]),
        *((name, "misaligned") for name in PARAMETERS),
        *((name, layout) for name in OUTPUTS for layout in ("gap", "misaligned")),
    }
    widths = [each.case.num_cols for each in draws]
    assert min(widths) == 1 and max(widths) > 2**19
    # One call differs from another in each of its fields.
    for name in Case.__dataclass_fields__:
        assert len({getattr(each.case, name) for each in draws}) > 1, name
    hows = [each.how for each in draws if each.how]
    assert {each.scaling for each in hows} == set(SCALINGS)
    for at in range(len(How._fields)):
        assert len({each[at] for each in hows}) > 1, How._fields[at]


def test_huge_weights_make_a_narrow_y_overflow():
    case = Case("layer_norm", 40, 96, "float32", y="float16", weight="float16")
    problem = problem_of(Draw(case, values="huge weights"))
    y = expect(problem)["y"][0]
    assert 0 < (np.abs(y) > 65520).sum() < y.size / 20
    np.testing.assert_array_equal(
        decode(encode(problem.weight, "float16"), "float16"), problem.weight
    )


def test_calls_in_a_row_share_their_kernels():
    """What varies among them has no part in the choice of a kernel, or few values."""
    free = dict(num_rows=1, num_cols=1, sm_margin=0, eps=0.0)
    of_some_routes = dict(dsum=False, recompute=False, dy=None)
    per_case = PER_CASE["gpu"]
    of_wide_rows = range(per_case - 8, per_case)
    for indices in (range(per_case - 8), of_wide_rows, range(per_case, 2 * per_case - 8)):
        draws = [draw(1, index, "gpu") for index in indices]
        assert len({replace(each.case, **free, **of_some_routes) for each in draws}) == 1
        assert len({tuple(each.layouts.items()) for each in draws if each.route == "kernels"}) <= 3
        widths = [each.case.num_cols for each in draws]
        assert len({width & -width for width in widths}) == 1 and min(widths) > max(widths) / 2
        if indices is of_wide_rows:
            assert min(widths) > 2**13
        else:
            assert max(widths) <= 2**14 and len({each.case.num_rows for each in draws}) > 8
    assert draw(1, 0, "gpu").case.x != draw(1, per_case, "gpu").case.x


def test_what_is_drawn_is_possible():
    draws = [draw(3, index, on) for on in ("cpu", "gpu") for index in range(0, 102400, 251)]
    for each in draws:
        assert possible(each) == each
    assert any(each.values in ("zeros", "a NaN") and each.how for each in draws)


# What a call is held to: a machine with each fault.


class FaultyMachine(CpuMachine):
    """Kernels whose memory a fault changes after they ran. It is fetched in the order of launch."""

    def __init__(self, fault) -> None:
        super().__init__()
        self.fault, self.num_fetched = fault, 0

    def get(self, array):
        self.num_fetched += 1
        array = array.copy()
        self.fault(array.view(np.uint8), self.num_fetched)
        return array


def change_results(monkeypatch, change) -> None:
    """change(made, time) returns other results. time: 0, 1 of the same call, 2 of a row alone."""
    right, quantize = judge.start, judge.run_quantized

    def start(drawn, problem, where, times=1):
        is_alone, is_8_bits = problem.case.num_rows == 1, drawn.how is not None
        first = 2 if is_alone else 1 if is_8_bits else 0
        return [
            lambda read=read, time=time: change(read(), time)
            for time, read in enumerate(right(drawn, problem, where, times), first)
        ]

    def run_quantized(*given):
        made, plain = quantize(*given)
        return change(made, 0), plain

    monkeypatch.setattr(judge, "start", start)
    monkeypatch.setattr(judge, "run_quantized", run_quantized)


def sentences(found) -> list[str]:
    return [each.sentence for each in found]


def complaints(fault, drawn: Draw = PLAIN) -> str:
    return "\n".join(sentences(judge.complaints(drawn, FaultyMachine(fault))))


def test_right_kernels_pass():
    assert complaints(lambda memory, count: None) == ""


@pytest.mark.parametrize("name", ["y", "mean", "rstd", "dx", "dweight", "dbias"])
def test_a_wrong_element_is_found(name, monkeypatch):
    """One element of one output, its largest, off by 2^-16 of itself."""

    def spoil(made, time):
        at = np.unravel_index(np.abs(made[name]).argmax(), made[name].shape)
        made[name][at] *= 1 + 2.0**-16
        return made

    change_results(monkeypatch, spoil)
    found = judge.complaints(PLAIN, CpuMachine())[0]
    assert found.sentence.startswith(f"{name}: 1 elements are off")
    assert found.kind == f"{name}: a number for a number"


@pytest.mark.parametrize("name", ["y", "dweight"])
def test_an_absent_output_is_found(name, monkeypatch):

    def leave_out(made, time):
        return {key: each for key, each in made.items() if key != name}

    change_results(monkeypatch, leave_out)
    assert sentences(judge.complaints(PLAIN, CpuMachine())) == [f"{name} is not judged"]


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each != "transposed"])
def test_right_kernels_pass_in_every_layout(layout):
    layouts = {name: layout for name in ("x", "dy")}
    assert complaints(lambda memory, count: None, replace(PLAIN, layouts=layouts)) == ""


OF_8_BITS = replace(PLAIN, how=How("float8_e4m3fn", "row"))


@pytest.mark.parametrize("name", ["y", "scale_inv", "mean", "rstd"])
def test_a_wrong_bit_of_an_8_bit_call_is_found(name, monkeypatch):
    """Also in a call that is repeated, and in a row alone."""
    assert judge.complaints(OF_8_BITS, CpuMachine()) == []

    def found_in(wrong_time):
        def spoil(made, time):
            if time == wrong_time:
                made[name].view(np.uint8).reshape(-1)[0] ^= 1
            return made

        with monkeypatch.context() as patch:
            change_results(patch, spoil)
            return sentences(judge.complaints(OF_8_BITS, CpuMachine()))

    assert found_in(0)[0].startswith(f"{name}: 1 elements are off")
    assert found_in(1) == [f"{name} differs when the call is repeated"]
    assert found_in(2) == [f"row 2 of {name} differs alone"]


def test_a_write_outside_an_8_bit_y_is_found():
    def spoil(memory, count):
        if count == 6:  # scale_inv, amax, weight, bias and x come first, then y
            memory[-1] = 0

    assert complaints(spoil, OF_8_BITS) == "y: 1 bytes outside it were written to"


@pytest.mark.parametrize("at", [GUARD_BYTES - 1, -1])
def test_a_write_to_a_guard_is_found(at):
    def spoil(memory, count):
        if count == 4:  # weight, bias and x come first, then y
            memory[at] = 0

    assert complaints(spoil) == "y: 1 bytes outside it were written to"


def test_a_write_to_an_input_is_found():
    def spoil(memory, count):
        if count == 1:
            memory[GUARD_BYTES] ^= 1

    assert complaints(spoil) == "weight was written to, or what surrounds it"


def test_a_result_that_does_not_repeat_is_found(monkeypatch):
    change_results(monkeypatch, lambda made, time: {"y": np.full_like(made["y"], time == 1)})
    monkeypatch.setattr(judge, "judge_against", lambda *given, **options: [])
    found = sentences(judge.complaints(PLAIN, CpuMachine()))
    assert "y differs when the call is repeated" in found


def test_a_row_that_differs_alone_is_found(monkeypatch):
    change_results(monkeypatch, lambda made, time: {"y": np.full_like(made["y"], time == 2)})
    monkeypatch.setattr(judge, "judge_against", lambda *given, **options: [])
    found = judge.complaints(PLAIN, CpuMachine())
    assert found[-1] == ("row N of y differs alone", f"row {7 % 5} of y differs alone")


def test_a_zero_of_the_other_sign_differs():
    zero = np.array([0.0, np.nan])
    assert judge.has_same_bits(zero, np.array([0.0, -np.nan]))
    assert not judge.has_same_bits(zero, np.array([-0.0, np.nan]))


def test_a_tile_that_does_not_fit_is_refused():
    drawn = replace(PLAIN, case=replace(PLAIN.case, strategy="warp", tile=Tile(4, 8, 2, 4)))
    with pytest.raises(judge.Refused, match="tile holds 64 columns"):
        rerun(drawn, "cpu")


def test_a_forced_strategy_that_does_not_fit_is_refused():
    drawn = replace(PLAIN, case=replace(PLAIN.case, strategy="warp", num_cols=2**17, num_rows=1))
    with pytest.raises(judge.Refused, match="too narrow"):
        rerun(drawn, "cpu")


# Reports.


def test_the_smallest_call_keeps_only_what_matters():
    case = Case("rms_norm", 100, 77, "float16", y="float32", residual=True, sm_margin=60)
    drawn = Draw(case, "outliers", {"x": "gap", "residual": "broadcast"}, seed=3)

    def fails(simpler: Draw) -> bool:
        return simpler.case.residual and simpler.case.num_cols > 40 and "x" in simpler.layouts

    small = smallest(drawn, fails, seconds=10)
    assert small == Draw(
        Case("rms_norm", 1, 41, "float16", residual=True), layouts={"x": "gap"}, seed=3
    )


@pytest.mark.parametrize("how", [None, How("float8_e5m2", "tensor", power_of_two=True)])
def test_three_lines_of_python_make_the_call_again(how, capsys):
    case = replace(PLAIN.case, strategy="warp", tile=Tile(4, 8, 3, rows_per_block=4))
    drawn = replace(PLAIN, case=case, values="outliers", layouts={"x": "gap"}, how=how)
    lines = as_python(drawn, "cpu")
    assert len(lines.splitlines()) == 3
    names: dict = {}
    exec(
        lines.replace("print(rerun(Draw(", "drawn = ((Draw(").replace("), 'cpu'))", "), 'cpu'))"),
        names,
    )
    assert names["drawn"] == (drawn, "cpu")
    exec(lines, {})
    assert capsys.readouterr().out == "\n"  # nothing is wrong


def test_a_time_without_a_call_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(command, "_fuzz", lambda *given: command.Batch(0, 7, []))
    assert main.main(["fuzz", "--seed", "1", "--on", "cpu", "--seconds", "3"]) == 1
    assert "OFF: no call was made in 3 s" in capsys.readouterr().out


def test_without_a_compiler_it_says_what_to_install(monkeypatch, capsys):
    def compiler():
        raise on_cpu.NoCompilerError("a C++20 compiler is needed")

    monkeypatch.setattr(on_cpu, "compiler", compiler)
    assert main.main(["fuzz", "--on", "cpu", "--seconds", "3"]) == 2
    assert capsys.readouterr().err == "cupynorm: a C++20 compiler is needed\n"


REPLAY = ["fuzz", "--seed", "1", "--replay", "3", "--on", "cpu"]
WRONG = judge.Complaint.of("dx: all wrong")


def test_replay_shows_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(command, "complaints", lambda drawn, where: [WRONG])
    monkeypatch.setattr(command, "_SHRINK_SECONDS", 0.0)
    assert main.main(REPLAY) == 1
    shown = capsys.readouterr().out
    assert "dx: all wrong" in shown and "from cupynorm.check.fuzz import" in shown
    monkeypatch.setattr(command, "complaints", lambda drawn, where: [])
    assert main.main(REPLAY) == 0


def test_the_smaller_call_that_is_shown_fails_in_the_same_way(monkeypatch, capsys):
    """Every call without another dtype of y is off too, but by a NaN in the place of a number."""
    wrong = judge.Complaint("y: a number for a number", "y: 7 elements are off")
    other = judge.Complaint("y: NaN for a number", "y: 7 elements are off, got nan")
    drawn = Draw(Case("rms_norm", 9, 8, "float32", y="float16", eps=1e-3))
    monkeypatch.setattr(command, "draw", lambda *given: drawn)

    def complaints(drawn, where):
        return [wrong if drawn.case.y else other] if drawn.case.norm == "rms_norm" else []

    monkeypatch.setattr(command, "complaints", complaints)
    assert main.main(REPLAY) == 1
    shown = capsys.readouterr().out
    assert "Case('rms_norm', 1, 1, 'float32', y='float16')\n" in shown
    assert shown.count(wrong.sentence + "\n") == 2 and other.sentence not in shown


def test_no_smaller_call_is_shown_once_every_call_fails(monkeypatch, capsys):
    """As on a GPU after a kernel wrote to an illegal address."""
    monkeypatch.setattr(command, "complaints", lambda drawn, where: [WRONG])
    drawn = Draw(Case("rms_norm", 9, 8, "float32", y="float16"))
    monkeypatch.setattr(command, "draw", lambda *given: drawn)
    assert main.main(REPLAY) == 1
    shown = capsys.readouterr().out
    assert "Case('rms_norm', 9, 8, 'float32', y='float16')\n" in shown and "smaller" not in shown


def test_failures_are_counted_and_shown(monkeypatch, capsys):
    found = command.Batch(10, 2, [(4, [WRONG])])
    monkeypatch.setattr(command, "_fuzz", lambda *given: found)
    monkeypatch.setattr(command, "_SHRINK_SECONDS", 0.0)
    assert main.main(["fuzz", "--seed", "1", "--on", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "call 4: " in shown and "OFF: 1 of 10 calls" in shown


def test_failures_after_the_first_five_have_a_line_each(monkeypatch, capsys):
    found = command.Batch(10, 2, [(index, [WRONG]) for index in range(7)])
    monkeypatch.setattr(command, "_fuzz", lambda *given: found)
    monkeypatch.setattr(command, "_show", lambda index, *given: print(f"call {index} in full"))
    assert main.main(["fuzz", "--seed", "1", "--on", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:7] == [
        "call 4 in full",
        *(f"call {index}: {WRONG.sentence}" for index in (5, 6)),
    ]


def test_an_error_of_a_call_is_a_failure(monkeypatch):
    def fail(*given, **options):
        raise RuntimeError("error 700 in a kernel")

    monkeypatch.setattr(judge, "start", fail)
    index = next(
        index for index in range(0, 640, PER_CASE["cpu"]) if draw(1, index, "cpu").how is None
    )
    wrong = ("RuntimeError: error N in a kernel", "RuntimeError: error 700 in a kernel")
    found = command.batch(1, range(index, index + 1), "cpu")._replace(began=0.0)
    assert found == command.Batch(1, 0, [(index, [wrong])])


class _Call:
    """A started call. Every call fails from number `culprit` on, as after an illegal address."""

    culprit = 5
    is_useless = False

    def __init__(self, drawn, where):
        _Call.is_useless |= drawn == self.culprit

    def complaints(self):
        return [WRONG] if _Call.is_useless else []


def test_the_call_that_makes_a_gpu_useless_is_found(monkeypatch):
    """Calls before it that were started fail too, but pass in a process of their own."""
    monkeypatch.setattr(_Call, "is_useless", False)
    monkeypatch.setattr(command, "machines", lambda on: [object() for _ in range(4)])
    monkeypatch.setattr(command, "draw", lambda seed, index, on: index)
    monkeypatch.setattr(command, "Started", _Call)
    monkeypatch.setattr(command, "_is_useless", lambda where: _Call.is_useless)
    found = command.batch(1, range(100), "gpu")._replace(began=0.0)
    assert found == command.Batch(3, 0, [(2, [WRONG])], range(2, 6))

    class Pool:
        """Each task in a process of its own."""

        def __init__(self, *given, **options): ...

        def __enter__(self):
            return self

        def __exit__(self, *given): ...

        def submit(self, function, *given):
            _Call.is_useless = False
            made = function(*given)
            return SimpleNamespace(result=lambda: made)

    monkeypatch.setattr(command, "ProcessPoolExecutor", Pool)
    assert command._culprit(1, found.lost, "gpu") == (5, [WRONG])
    assert command._culprit(1, range(2, 5), "gpu") is None


def test_no_call_begins_after_the_deadline():
    made = command.batch(1, range(8), "cpu", deadline=0.0)
    assert made._replace(began=0.0) == command.Batch(0, 0, [])


def test_calls_of_the_second_half_are_counted(monkeypatch, capsys):
    made = command.batch(1, range(3), "cpu", half=0.0)
    assert made.num_judged == made.num_late == 3
    assert command.batch(1, range(3), "cpu").num_late == 0
    monkeypatch.setattr(command, "_fuzz", lambda *given: made)
    assert main.main(["fuzz", "--seed", "1", "--on", "cpu", "--seconds", "2"]) == 0
    assert "; 180 a minute in the second half\n" in capsys.readouterr().out


def test_replay_needs_a_seed(capsys):
    assert main.main(["fuzz", "--replay", "3", "--on", "cpu"]) == 2
    assert "--replay was given without --seed" in capsys.readouterr().err


@pytest.mark.slow
def test_random_calls_on_the_cpu(capsys):
    assert_right("--seconds", "20", "--jobs", "1", "--on", "cpu", capsys=capsys)


@pytest.mark.gpu
def test_random_calls_on_a_gpu(capsys):
    assert_right("--seconds", "20", "--jobs", "2", capsys=capsys)


def assert_right(*arguments, capsys):
    code = main.main(["fuzz", "--seed", "2", *arguments])
    shown = capsys.readouterr().out
    assert code == 0 and shown.startswith("OK: "), shown
