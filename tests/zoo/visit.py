"""One family in the whole system: real vLLM, three training steps, the export in another vLLM.

save ─▶ server ─▶ learner train: parity, 3 × (step, push, parity) ─▶ score ─▶ export: transformers, plain vLLM
"""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from transformers import AutoModelForCausalLM

from tests.inference_server.drifting_policy import batch_logprobs
from tests.inference_server.real_server import ROOT, RealServer
from tests.learner.forked_learner import run_learner
from tests.zoo.families import save_model

WITH_ADAPTER = ("llama", "gemma3", "mixtral")
REFUSED = {"qwen3_5": "torchvision"}
"""Families that cannot run here, with a word of the error."""
NUM_STEPS = 3
BOUND = 1e-4
"""Largest |Δ logprob| between vLLM, the learner and transformers in float32."""
TOKENS = [1 + index * 7 % 15 for index in range(48)]
PLAIN_TIMEOUT_S = 200
LEARNER = f"""
[learner.data]
task = "reverse"
num_digits = 4
num_prompts = 8
[learner.reward]
functions = ["share_right"]
[learner.sampling]
group_size = 8
max_tokens = 8
[learner.parity]
max_mean_abs_logprob = {BOUND}
"""
FLAGS = [
    "--learner.steps", str(NUM_STEPS), "--learner.groups-per-step", "4", "--learner.max-staleness", "0",
    "--learner.report.dashboard-port", "0", "--learner.connect-timeout-s", "240",
]  # fmt: skip


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a family. Distances are the largest |Δ logprob| of any token, unless called a mean."""

    family: str
    lora: bool = False
    refused: str = ""
    """Why the family cannot run. All other attributes are then None."""
    parity_at_start: float | None = None
    """Mean distance between server and learner after the first sync."""
    parity_in_training: float | None = None
    """Largest mean distance between server and learner of the syncs that a step followed."""
    after_last_push: float | None = None
    """Distance between the server and transformers with the export of the same version."""
    moved: float | None = None
    """Distance between the server's logprobs before and after training."""
    export_in_vllm: float | None = None
    """Distance between the server and a plain vLLM with the export."""

    @property
    def distances(self) -> list[float | None]:
        return [self.parity_at_start, self.parity_in_training, self.after_last_push, self.export_in_vllm]

    @property
    def is_as_expected(self) -> bool:
        if self.family in REFUSED:
            return REFUSED[self.family] in self.refused
        agrees = all(one is not None and one <= BOUND for one in self.distances)
        return not self.refused and agrees and (self.moved or 0) > 1e-3


def table(visits: Sequence[Visit]) -> str:
    """Return the table of the docs."""
    rows = [
        "| family | after the first sync | in training | after the last sync | export in vLLM |",
        "|---|---|---|---|---|",
    ]
    for visit in visits:
        name = visit.family + (" (LoRA)" if visit.lora else "")
        cells = (
            ["refused", "", "", ""] if visit.refused else [f"{one:.0e}" for one in visit.distances if one is not None]
        )
        rows.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(rows)


def visit(family: str, directory: Path, *, lora: bool = False) -> Visit:
    model = directory / "model"
    save_model(family, model)
    server = RealServer(directory, "--server.max-model-len", "128", model=model, is_forked=True)
    try:
        server.wait_for("ready after")
        return _through_the_system(server, family, directory, lora)
    except AssertionError as failure:
        return Visit(family=family, lora=lora, refused=reason(str(failure)))
    finally:
        server.kill()


def _through_the_system(server: RealServer, family: str, directory: Path, lora: bool) -> Visit:
    before = served_logprobs(server)
    config, run_dir = directory / "run.toml", directory / "run"
    config.write_text(config.read_text() + LEARNER)
    kind = ["--learner.lora.rank", "4", "--learner.optimizer.learning-rate", "1e-2" if lora else "1e-3"]
    done = run_learner("train", str(config), "--run-dir", str(run_dir), *FLAGS, *kind[0 if lora else 2 :])
    (directory / "learner.log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"mean \|Δ logprob\| = ([\d.e+-]+)", done.stdout + done.stderr)
    assert found is not None, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    export, after = run_dir / "checkpoints" / f"step-{NUM_STEPS:06d}" / "model", served_logprobs(server)
    # Eager, because the default of transformers, sdpa, ignores Gemma 2's soft cap.
    exported = AutoModelForCausalLM.from_pretrained(export, dtype="float32", attn_implementation="eager")
    (expected,) = batch_logprobs(exported.eval(), [TOKENS])
    return Visit(
        family=family,
        lora=lora,
        parity_at_start=float(found[1]),
        parity_in_training=max(line["parity/abs_logprob"] for line in metrics if "parity/abs_logprob" in line),
        after_last_push=distance(after, expected),
        moved=distance(after, before),
        export_in_vllm=distance(after, plain_logprobs(export)),
    )


def served_logprobs(server: RealServer) -> Sequence[float]:
    """Return logprobs from the server's OpenAI API."""
    body = {"model": str(server.model), "prompt": TOKENS, "max_tokens": 1, "echo": True, "logprobs": 0}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["logprobs"]["token_logprobs"][1 : len(TOKENS)]


def plain_logprobs(export: Path) -> Sequence[float]:
    command = [sys.executable, "-m", "tests.zoo.plain_vllm", str(export), json.dumps(TOKENS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PLAIN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def distance(left: Sequence[float], right: Sequence[float]) -> float:
    return float(np.abs(np.asarray(left) - np.asarray(right)).max())


def reason(log: str) -> str:
    """Return the line of a log with the reason: a missing package, the error of a command, or the first exception."""
    missing = re.findall(r"ModuleNotFoundError: .*", log)
    ends = re.findall(r"^error: .*", log, re.MULTILINE)
    causes = re.findall(r"\b\w+Error: .*", log)
    return (missing[-1:] or ends[-1:] or causes[:1] or [log])[0][-300:]
