"""Measure evaluations of 500 problems during the demo, on its server: `python -m tests.bench.evaluation --help`.

    the demo, evaluated during its steps ─▶ training_slowdown, by the run and by the clock
    the demo, evaluated pinned ─┬▶ answers, as the learner keeps them during an evaluation
                                └▶ checkpoint of the same version ─▶ `vllm.LLM.generate`, compared: DIR/evaluation.json

Exit code 1 if a pinned answer differs where the weights prefer one of the two tokens by more than MAX_TIE in logprob.
"""

import argparse
import json
import os
import statistics
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from inference_server.config import ServerRun
from learner.config import LearnerRun
from learner.evaluation import background, results
from learner.evaluation.eval_sets import sets_of
from learner.policy.model import load_policy
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import checkpoint_of
from protocol.errors import SlipstreamError
from protocol.messages import Sampling
from tests.bench.bare_vllm import BareVllm, Order
from tests.bench.colocated import ROOT, read_metrics, run_colocated
from tests.bench.machine import machine, versions

RECIPE = ROOT / "deploy" / "recipes" / "reverse.toml"
NUM_PROBLEMS = 500
NUM_EVALUATIONS = 3
STEPS_BEFORE = 20
"""Number of earlier steps to compare with the steps during an evaluation."""
MAX_TIE = 1e-4
"""Larger than the rounding error of a float32 sum in another order."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.evaluation", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-evaluation"), help="directory of runs and results")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run; evaluated after each third")
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        result = run(options.out, options.steps)
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    (options.out / "evaluation.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if options.json else "\n".join(f"{key:<24}{value}" for key, value in result.items()))
    sys.exit(0 if result["num_clearly_different"] == 0 else 1)


def run(out: Path, steps: int) -> dict[str, Any]:
    """Run both. Return the results, the headline first."""
    files = (out / time.strftime("files-%Y%m%d-%H%M%S")).resolve()
    beside, pinned = (config_of(files / name, steps, pin=pin) for name, pin in (("beside", False), ("pinned", True)))
    run_colocated(beside, beside.server)
    answers = _Answers(Path(pinned.run_dir), files)
    run_colocated(pinned, pinned.server, meanwhile=answers.look)
    compared = compare(pinned, answers.by_step())
    costs = [cost for cost in costs_of(beside) if cost["steps_beside"]]
    return {
        "num_identical": sum(one["num_identical"] for one in compared),
        "num_problems": len(compared) * NUM_PROBLEMS,
        "num_clearly_different": sum(gap > MAX_TIE for one in compared for gap in one["gaps"]),
        "training_slowdown": statistics.median(cost["training_slowdown"] for cost in costs),
        "slowdown_by_clock": statistics.median(cost["slowdown_by_clock"] for cost in costs),
        "beside": costs,
        "pinned": costs_of(pinned),
        "compared": compared,
        "machine": machine(),
        "versions": versions(Path(sys.executable)),
    }


def config_of(run_dir: Path, steps: int, *, pin: bool) -> LearnerRun:
    """Return the demo with an evaluation after each third of its steps; all these checkpoints are kept."""
    table = tomllib.loads(RECIPE.read_text())
    every = steps // NUM_EVALUATIONS
    table["run_dir"] = str(run_dir)
    table["learner"] |= {
        "steps": every * NUM_EVALUATIONS,
        "evaluation": {"every_steps": every, "task": "reverse", "num_prompts": NUM_PROBLEMS, "pin_policy": pin},
        "checkpoint": {"every_steps": every, "keep_last": NUM_EVALUATIONS},
        "report": {"dashboard_port": 0},
    }
    return msgspec.convert(table, LearnerRun)


class _Answers:
    """Keeps the files of answers with hard links. The learner removes a file when its evaluation is recorded."""

    def __init__(self, run_dir: Path, directory: Path) -> None:
        self._file, self._directory = run_dir / background.FILE, directory

    def look(self) -> None:
        try:
            step = json.loads(self._file.read_text().splitlines()[0])["step"]
            os.link(self._file, self._directory / f"answers-{step}.jsonl")
        except (FileNotFoundError, FileExistsError, IndexError, ValueError):
            return  # no evaluation is running, its file is known, or its first line is incomplete

    def by_step(self) -> dict[int, list[list[int]]]:
        """Return the tokens of each answer by step, in the order of the problems."""
        found = {}
        for path in self._directory.glob("answers-*.jsonl"):
            first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
            by_place = {line["place"]: line["answered"]["token_ids_K"][0] for line in lines}
            found[first["step"]] = [by_place[place] for place in range(NUM_PROBLEMS)]
        return dict(sorted(found.items()))


def costs_of(run: LearnerRun) -> list[dict[str, Any]]:
    """Return the duration of each evaluation and its slowdown of steps."""
    lines = read_metrics(Path(run.run_dir))
    slowdown = "evaluation/training_slowdown"
    slowdowns = {line["evaluation/step"]: line[slowdown] for line in lines if slowdown in line}
    return [
        cost_of(one, lines) | {"training_slowdown": slowdowns.get(one.step)}
        for one in results.earlier(Path(run.run_dir) / results.FILE)
    ]


def cost_of(one: results.Evaluation, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return seconds per step during the evaluation ÷ those of earlier steps."""
    began_at = one.time - one.seconds
    before = [line["time"] for line in lines if line["time"] <= began_at][-STEPS_BEFORE - 1 :]
    beside = [line["time"] for line in lines if line["time"] > began_at and line["step"] > (one.step or 0)]
    until = next((i for i, at in enumerate(beside) if at >= one.time), None)
    steps_beside = 0 if until is None else until + 1
    step_s = (before[-1] - before[0]) / (len(before) - 1)
    seconds = 0.0 if until is None else beside[until] - before[-1]
    return {
        "step": one.step,
        "reward": one.reward.mean if one.reward else None,
        "versions": one.versions,
        "seconds": one.seconds,
        "steps_beside": steps_beside,
        "slowdown_by_clock": seconds / steps_beside / step_s if steps_beside else None,
        "training_lost_s": seconds - steps_beside * step_s if steps_beside else None,
    }


def compare(run: LearnerRun, answers: dict[int, list[list[int]]]) -> list[dict[str, Any]]:
    """Compare the pinned answers with those of plain vLLM with the exported checkpoint of the same version."""
    (questions,) = sets_of(RunInputs(run))
    prompts = [prompt.token_ids for prompt in questions.prompts]
    sampling = Sampling(num_completions=1, max_tokens=run.learner.sampling.max_tokens, temperature=0.0)
    compared = []
    for step, answered in answers.items():
        model = checkpoint_of(run.checkpoint_dir, step) / "model"
        table = {"model": str(model), "run_dir": run.run_dir, "dtype": run.dtype, "server": run.server}
        bare = BareVllm(msgspec.convert(table, ServerRun), questions.tokenizer.eos_token_id)
        try:
            generated = bare.generate(Order(prompts, [sampling] * len(prompts)))
        finally:
            bare.close()
        pairs = list(zip(prompts, answered, (tokens for (tokens,) in generated.token_ids), strict=True))
        gaps = gaps_of(model, [pair for pair in pairs if pair[1] != pair[2]])
        compared.append(
            {"step": step, "num_identical": len(pairs) - len(gaps), "gaps": gaps, "bare_s": generated.seconds}
        )
    return compared


@torch.no_grad()
def gaps_of(model: Path, pairs: Sequence[tuple[list[int], list[int], list[int]]]) -> list[float]:
    """Return the difference of logprobs at the first token in which two answers to a prompt differ."""
    policy, gaps = load_policy(model, gradient_checkpointing=False), []
    for prompt, one, other in pairs:
        place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if place is None:  # one answer is a prefix of the other
            gaps.append(float("inf"))
            continue
        logprobs_V = policy(torch.tensor([prompt + one[:place]])).logits[0, -1].log_softmax(-1)
        gaps.append(abs(float(logprobs_V[one[place]] - logprobs_V[other[place]])))
    return gaps


if __name__ == "__main__":
    main()
