"""The whole system on one GPU beside TRL on the same work: `make gpu-bench`, or
`python -m tests.bench.gpu [--sides ipc nccl trl] …`.

    random weights, prompts ─┬─▶ server and learner, both on the GPU, by the user's command ─┬─▶ DIR/<side>.json
                             └─▶ TRL's GRPOTrainer with vLLM in its process, if installed ───┘        │
                                                            DIR/gpu.md: one table of all sides ◀──────┘

A side that is measured in another call, with the same --out, keeps its column. `--device cpu` runs all of it without
a GPU: weight syncs over TCP, TRL generating with transformers, and the peak is the measured rate of large matrix
products.
"""

import argparse
import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig

from learner.config import LearnerRun
from learner.config.learner import AUTO_TOKENS
from learner.policy.model_shape import shape_of
from learner.training.metrics import TERA, peak_tflops
from protocol.errors import SlipstreamError
from protocol.transports.nccl import SHARED_GPU_SWITCH, ranks_may_share_a_gpu, why_not_installed
from tests.bench.colocated import read_metrics, run_colocated
from tests.bench.gpu_table import SideTotals, as_markdown, our_totals, trl_totals
from tests.bench.machine import matrix_rate as rate_of_cores
from tests.bench.machine import versions
from tests.bench.step_gpu import matrix_rate as rate_of_gpu
from tests.bench.step_model import HALF_B, ONE_AND_A_HALF_B, SMALL, make_model
from tests.bench.trl_side import run_trl, trl_job
from tests.bench.workload_run import NEVER

SIZES = {"small": SMALL, "0.5b": HALF_B, "1.5b": ONE_AND_A_HALF_B}
DIGITS = "0123456789"
NUM_PROMPTS = 2048
TRL = "trl"
SIDES = {"cpu": ["tcp", TRL], "cuda": ["ipc", "nccl", TRL]}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"size": "small", "steps": 8, "groups": 4, "group_size": 4, "prompt": 12, "max_tokens": 16},
    "cuda": {"size": "0.5b", "steps": 20, "groups": 32, "group_size": 8, "prompt": 64, "max_tokens": 512},
}
SERVERS: dict[str, dict[str, Any]] = {
    "cpu": {"max_concurrent_sequences": 256, "kv_cache_memory_mib": 64, "block_size": 32, "enforce_eager": True},
    # The share is TRL's: it cannot give its vLLM a KV cache of a given size.
    "cuda": {"max_concurrent_sequences": 512, "gpu_memory_utilization": 0.35, "kv_cache_memory_mib": 12288},
}


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What every side trains on."""

    device: str
    size: str
    steps: int
    groups: int
    group_size: int
    prompt: int
    max_tokens: int
    warm_up: int


def main() -> None:
    options = parse_options(sys.argv[1:])
    try:
        print(run(options))
    except SlipstreamError as error:
        sys.exit(f"error: {error}")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu"), help="where runs and results go")
    parser.add_argument("--device", choices=list(SIDES), default="cuda")
    parser.add_argument(
        "--sides", nargs="+", choices=sorted({*SIDES["cpu"], *SIDES["cuda"]}), help="by default all that can run here"
    )
    parser.add_argument("--size", choices=SIZES, help="of the model")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--warm-up", type=int, default=2, help="first steps of each run that are left out, at least 1")
    parser.add_argument("--groups", type=int, help="of each step")
    parser.add_argument("--group-size", type=int, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument(
        "--max-tokens", type=int, help="of a completion; random weights of a large vocabulary hardly end sooner"
    )
    parser.add_argument("--server", type=json.loads, default={}, help="JSON: more keys of [server]")
    parser.add_argument("--learner", type=json.loads, default={}, help="JSON: more keys of [learner]")
    options = parser.parse_args(arguments)
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu runs the same without one")
    if not 1 <= options.warm_up < options.steps:
        parser.error(f"--warm-up {options.warm_up} must be at least 1 and less than --steps {options.steps}")
    return options


def run(options: argparse.Namespace) -> str:
    """Measure the sides; return the table of all that have been measured into `out`."""
    work = Work(**{name: getattr(options, name) for name in Work.__struct_fields__})
    files = options.out.resolve() / time.strftime("files-%Y%m%d-%H%M%S")
    files.mkdir(parents=True)
    require_same_work(options.out, work)
    make_model(SIZES[work.size], files / "model", torch.bfloat16 if work.device == "cuda" else torch.float32)
    if work.device == "cuda":
        torch.cuda.empty_cache()
    write_prompts(work, files / "prompts.jsonl")
    for side in options.sides or SIDES[work.device]:
        if (why_not := obstacle(side)) is not None:
            say(f"{side}: skipped, {why_not}")
            continue
        say(f"{side}: {work.steps} steps")
        config = config_of(work, side, files, options.server, options.learner)
        totals = run_trl_side(work, config, files) if side == TRL else run_our_side(work, config, side)
        (options.out / f"{side}.json").write_bytes(msgspec.json.format(msgspec.json.encode(totals)))
    text = report(options.out, work)
    (options.out / "gpu.md").write_text(text)
    return text


def require_same_work(out: Path, work: Work) -> None:
    """Raise SlipstreamError if `out` holds sides of another work, whose columns would not compare."""
    file, encoded = out / "work.json", msgspec.json.encode(work)
    if file.exists() and msgspec.json.decode(file.read_bytes(), type=Work) != work:
        raise SlipstreamError(
            f"{out} holds results of other work: {file.read_text()}; choose another directory with --out"
        )
    file.write_bytes(encoded)


def obstacle(side: str) -> str | None:
    """Why this machine cannot run a side."""
    if side == TRL:
        return None if importlib.util.find_spec("trl") else "TRL is not installed (pip install trl==1.16.0)"
    if side != "nccl":
        return None
    os.environ[SHARED_GPU_SWITCH] = "1"
    return why_not_installed() or (
        None if ranks_may_share_a_gpu() else "NCCL before 2.30.3 does not let two ranks share a GPU"
    )


def write_prompts(work: Work, path: Path) -> None:
    """One JSON line each, all different and of one length; a digit is a token."""
    draw = random.Random(0)
    numbers = {"".join(draw.choices(DIGITS, k=work.prompt)) for _ in range(NUM_PROMPTS)}
    path.write_text("".join(json.dumps({"prompt": number}) + "\n" for number in sorted(numbers)))


def config_of(
    work: Work, side: str, files: Path, server: dict[str, Any], learner: dict[str, Any]
) -> LearnerRun:  # fmt: skip
    """What the comparison fixes; everything else is the default."""
    keys = {
        "steps": work.steps,
        "groups_per_step": work.groups,
        "data": {"path": str(files / "prompts.jsonl")},
        "sampling": {"group_size": work.group_size, "max_tokens": work.max_tokens},
        "reward": {"functions": ["tests.bench.good_share:even_share"]},
        "optimizer": {"learning_rate": 1e-5},
        "checkpoint": {"every_steps": NEVER},
        "report": {"dashboard_port": 0},
    }
    if side != TRL:
        keys["weight_sync"] = {"transport": side}
    run = {
        "model": str(files / "model"),
        "run_dir": str(files / side),
        "dtype": "bfloat16" if work.device == "cuda" else "float32",
        "server": SERVERS[work.device] | {"max_model_len": work.prompt + work.max_tokens + 1} | server,
        "learner": keys | learner,
    }
    return msgspec.convert(run, LearnerRun)


def run_our_side(work: Work, config: LearnerRun, side: str) -> SideTotals:
    seen = run_colocated(config, config.server)
    lines = read_metrics(Path(config.run_dir))
    idle_frac = seen.idle_frac(lines[work.warm_up - 1]["time"], lines[-1]["time"])
    return our_totals(f"Slipstream, {side}", lines, work.warm_up, work.groups * work.group_size, idle_frac)


def run_trl_side(work: Work, config: LearnerRun, files: Path) -> SideTotals:
    """In this interpreter's environment, with as many rows in a pass as fit our tokens of one."""
    num_rows, longest = work.groups * work.group_size, work.prompt + work.max_tokens
    rows = max(n for n in range(1, num_rows + 1) if num_rows % n == 0 and n * longest <= max(AUTO_TOKENS, longest))
    found = run_trl(trl_job(config, rows, device=work.device), files / TRL, Path(sys.executable), 1)
    shape = shape_of(AutoConfig.from_pretrained(files / "model"))
    return trl_totals(found.steps, work.warm_up, shape, work.prompt, work.group_size, found.peak_gib)


def report(out: Path, work: Work) -> str:
    """The table, and what it was measured on."""
    files = [out / f"{side}.json" for side in SIDES[work.device]]
    sides = [msgspec.json.decode(file.read_bytes(), type=SideTotals) for file in files if file.exists()]
    if not sides:
        raise SlipstreamError("no side could run here; the reasons stand above")
    name, peak = device_and_peak(work.device)
    used = ", ".join(f"{package} {version}" for package, version in sorted(versions(Path(sys.executable)).items()))
    return (
        f"{work.size}, {work.groups} × {work.group_size} completions of at most {work.max_tokens} tokens after "
        f"{work.prompt} of the prompt, {sides[0].num_steps} steps after {work.warm_up} that do not count. {name}; "
        f"{used}.\n\n" + as_markdown(sides, peak)
    )


def device_and_peak(device: str) -> tuple[str, float]:
    """A line on the device, and its peak in TFLOP/s."""
    if device == "cpu":
        peak = rate_of_cores([0]) / TERA
        return f"One core: MFU of {peak:.3f} TFLOP/s, measured with a large float32 product", peak
    name = torch.cuda.get_device_name()
    peak_or_none = peak_tflops(name)
    if peak_or_none is not None:
        return f"{name}: MFU of its {peak_or_none:,.0f} TFLOP/s in dense bfloat16", peak_or_none
    peak = rate_of_gpu() / TERA
    return f"{name}, whose peak is unknown: MFU of {peak:,.0f} TFLOP/s, measured with a large bfloat16 product", peak


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
