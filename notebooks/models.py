"""Times six models with torch's norms and with cupynorm's, and compares losses and gradients.

    python notebooks/models.py [--models MODEL,..] [--runs RUN,..] [--steps 30] [--quick]
                               [--phases PHASE,..] [--whole N] [--graphs] [--profile]
                               [--device cuda] [--jobs N] [--seconds S]
                               [--json FILE [--resume]]
                               [--plot FILE] [--docs]
    python notebooks/models.py --from FILE [--plot FILE] [--docs]

Weights and inputs are random. All runs of a model share their weights. Each step has a new input,
on which the runs take turns.

run                 norms                                   torch.compile
torch               torch.nn.LayerNorm and RMSNorm          no
cupynorm            cupynorm's, by cupynorm.swap_norms      no
torch-compiled      as torch                                each block
cupynorm-compiled   as cupynorm                             each block

With --whole N a model has at most N layers and is compiled as one graph, which has the
addition before each norm. Blocks that are compiled one by one end with that addition.

A step of training is forward and backward: under autocast to bfloat16, or with weights in bfloat16
where such models are trained so. Inference has all weights in bfloat16; with --graphs it is also
timed in a CUDA graph, whose step copies its inputs and replays. A CPU computes in float32 and
compiles only the runs that --runs names. With --profile the time in which kernels are on the GPU is
measured too.

The distance of a run from the run torch is compared as in train_gpt.py: with that of torch's norms
computed in float64 and rounded once, which roundings alone explain.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from cupynorm.bench.documents import DOCUMENT, rewrite_table
from models_decoders import Decoder, Gpt2
from models_encoders import Bert, Dit, Vit
from models_report import COMPILED, PHASES, RUNS, Result, plot
from models_steps import NUM_WARM, Settings, Subject, compile_in_processes, measure, on_gpu
from tqdm import tqdm

from cupynorm.command_line import Appended, positive, several
from cupynorm.gpu.nvrtc import environment

BLOCKS = {False: "steps", True: "whole"}  # the markers in the document, without and with --whole

_TINY = {"num_layers": 2, "width": 64}
_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
# Vocabularies are padded to a multiple of 64, as in training: products of odd widths are slow.
MODELS = {
    "gpt2": Subject(
        "GPT-2 124M",
        "32 x 1024 tokens, float32 under autocast",
        Gpt2,
        {"num_layers": 12, "width": 768, "context": 1024, "num_tokens": 50304},
        _TINY | {"context": 32, "num_tokens": 100},
        (32, 2),
        torch.float32,
    ),
    "bert": Subject(
        "BERT-base",
        "64 x 512 tokens, float32 under autocast",
        Bert,
        {"num_layers": 12, "width": 768, "num_heads": 12, "context": 512, "num_tokens": 30528},
        _TINY | {"num_heads": 2, "context": 32, "num_tokens": 100},
        (64, 2),
        torch.float32,
    ),
    "vit": Subject(
        "ViT-L/16",
        "128 images of 224 x 224, float32 under autocast",
        Vit,
        {"num_layers": 24, "width": 1024, "num_heads": 16}
        | {"image_size": 224, "patch_size": 16, "num_classes": 1000},
        _TINY | {"num_heads": 2, "image_size": 32, "patch_size": 8, "num_classes": 10},
        (128, 2),
        torch.float32,
    ),
    "llama3": Subject(
        "Llama 3 8B, 2 layers",
        "2 x 4096 tokens, bfloat16, without embedding and head",
        Decoder,
        {"num_layers": 2, "width": 4096, "context": 4096, "base": 5e5, "eps": 1e-5}
        | {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "mlp_width": 14336}
        | {"with_norms": False},
        _TINY
        | _HEADS
        | {"context": 32, "base": 5e5, "eps": 1e-5, "mlp_width": 128, "with_norms": False},
        (2, 2),
        torch.bfloat16,
    ),
    "qwen3": Subject(
        "Qwen3 1.7B, 4 layers",
        "4 x 4096 tokens, bfloat16, q and k normalised, without embedding and head",
        Decoder,
        {"num_layers": 4, "width": 2048, "context": 4096, "base": 1e6, "eps": 1e-6}
        | {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "mlp_width": 6144}
        | {"with_norms": True},
        _TINY
        | _HEADS
        | {"context": 32, "base": 1e6, "eps": 1e-6, "mlp_width": 128, "with_norms": True},
        (4, 2),
        torch.bfloat16,
    ),
    "dit": Subject(
        "DiT-L/2, 1 block",
        "256 images of 256 tokens, float32 under autocast",
        Dit,
        {"num_layers": 1, "width": 1024, "num_heads": 16, "num_tokens": 256},
        {"num_layers": 1, "width": 64, "num_heads": 2, "num_tokens": 16},
        (256, 2),
        torch.float32,
    ),
}


def write_document(result: Result) -> None:
    """Rewrites the tables of ./docs/benchmarks.md. Raises ValueError if it lacks the markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    block = BLOCKS[bool(result.settings.get("whole"))]
    DOCUMENT.write_text(rewrite_table(text, result.markdown(), block), encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "Times six models with torch's norms and with cupynorm's, and compares the results."
    parser = argparse.ArgumentParser(description=about)
    add = parser.add_argument
    everything = ",".join(MODELS)
    listed, names = {"action": Appended}, several(tuple(MODELS))
    add("--models", type=names, default=(*MODELS,), help=f"default: {everything}", **listed)
    shown = f"some of {','.join(RUNS)}; always torch (default: all; on a CPU those not compiled)"
    add("--runs", type=several(RUNS), help=shown, **listed)
    add("--steps", type=positive, help="timed steps of each run (30; 3 with --quick)")
    shown = f"some of {','.join(PHASES)} (default: all)"
    add("--phases", type=several(PHASES), default=PHASES, help=shown, **listed)
    add("--quick", action="store_true", help="tiny models, to try the program on a CPU")
    shown = "compiles models of at most N layers as one graph, not each block"
    add("--whole", type=positive, metavar="N", default=0, help=shown)
    add("--graphs", action="store_true", help="times inference in CUDA graphs too, on a GPU")
    add("--profile", action="store_true", help="measures the time of kernels too, on a GPU")
    shown = "starts no model that would end later if it took as long as the slowest before"
    add("--seconds", type=positive, help=shown)
    add("--jobs", type=positive, default=1, help="processes that compile ahead (1: none)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of weights and inputs (0)")
    add("--from", dest="source", type=Path, metavar="FILE", help="shows a --json file again")
    add("--json", type=Path, metavar="FILE", help="writes all times and distances")
    shown = "keeps the phases of models that the --json file has already, and measures the others"
    add("--resume", action="store_true", help=shown)
    add("--plot", type=Path, metavar="FILE", help="draws the speeds: .svg, .png")
    add("--docs", action="store_true", help=f"rewrites the tables of ./{DOCUMENT.as_posix()}")
    given = parser.parse_args(arguments)
    if given.runs is None:
        given.runs = RUNS if on_gpu(given.device) else RUNS[:2]
    if given.resume and not given.json:
        parser.error(
            "--resume is given without --json; expected the file that has the first models"
        )
    if given.graphs and "inference" not in given.phases:
        parser.error("--graphs is given without inference; expected it among --phases")
    for name in ("graphs", "profile"):
        if getattr(given, name) and not given.source and not on_gpu(given.device):
            parser.error(f"--{name} is given with --device {given.device}; expected a GPU")
    given.steps = given.steps or (3 if given.quick else 30)
    given.runs = ("torch", *(run for run in given.runs if run != "torch"))
    return given


def resumed(result: Result, file: Path) -> Result:
    """The result in a file, if there is one: models are added to it.

    Raises ValueError if it was measured with other settings, versions or GPU than `result`.
    """
    if not file.exists():
        return result
    before = Result.from_json(file.read_text(encoding="utf-8"))
    for label, were, are in (
        ("settings", before.settings, result.settings),
        ("environment", before.environment, result.environment),
    ):
        for name in are.keys() - {"command", "date"}:
            was = were.get(name, Settings._field_defaults.get(name))  # of an older file
            if was != are[name]:
                raise ValueError(f"--resume: {name} of the {label} is {are[name]}, in {file} {was}")
    if before.settings["command"] != result.settings["command"]:
        before.settings["command"] += f" && {result.settings['command']} --resume"
    return before


def run(given: argparse.Namespace, arguments: Sequence[str]) -> Result:
    """Measures, and writes the JSON after each model."""
    start, slowest = time.perf_counter(), 0.0
    settings = Settings(
        given.runs, given.steps, given.quick, given.device, given.seed, given.graphs, given.profile
    )._replace(whole=given.whole)
    if given.quick and not on_gpu(given.device):
        torch.set_num_threads(1)  # more threads than free cores wait for each other
    # One backend more for each run, and each phase is compiled again.
    torch._dynamo.config.cache_size_limit = 64
    files = {str(each): each.name for each in (given.json, given.plot) if each}
    command = [files.get(each, each) for each in arguments if each != "--resume"]
    found = environment() | ({} if on_gpu(given.device) else {"gpu": None, "driver": None})
    noted = {"command": shlex.join(["python", "notebooks/models.py", *command])}
    noted |= settings._asdict() | {"runs": [*given.runs]}
    del noted["phases"]  # each model has its own
    settings = settings._replace(phases=given.phases)
    result = Result(found, noted, {}, [])
    if given.resume:
        result = resumed(result, given.json)
    todo = {name: result.missing(name, given.phases) for name in given.models}
    todo = {name: phases for name, phases in todo.items() if phases}
    if given.jobs > 1 and set(given.runs) & set(COMPILED):
        compile_in_processes([MODELS[name] for name in todo], settings, given.jobs)
    num_phases = sum(len(phases) + given.graphs for phases in todo.values())
    num_steps = num_phases * (NUM_WARM + given.steps)
    with tqdm(total=num_steps, unit="step", leave=False) as bar:
        for name, phases in todo.items():
            began = time.perf_counter()
            if given.seconds and began - start + slowest > given.seconds:
                result.left_out.append(f"{MODELS[name].title} was not started: no time was left.")
                continue
            try:
                model, failures = measure(MODELS[name], settings._replace(phases=phases), bar)
                result.add(name, model, [*MODELS])
            except Exception as error:  # keep the other models
                failures = [f"{MODELS[name].title} failed: {type(error).__name__}: {error}"]
            result.left_out += failures
            if given.json:
                given.json.write_text(result.to_json() + "\n", encoding="utf-8")
            if on_gpu(given.device):
                torch.cuda.empty_cache()
            slowest = max(slowest, time.perf_counter() - began)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a run failed or differs by more than roundings explain."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parse(arguments)
    result = (
        Result.from_json(given.source.read_text(encoding="utf-8"))
        if given.source
        else run(given, arguments)
    )
    print(result)
    if given.plot:
        plot(result, given.plot)
    if given.docs:
        write_document(result)
    return 1 if result.left_out or result.too_far else 0


if __name__ == "__main__":
    raise SystemExit(main())
