"""`slipstream export` as a user types it, with a push by HF_ENDPOINT to a local stand-in of the hub."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
from accelerate import Accelerator

from learner.publishing.publish import ExportRequest, export_run
from learner.storage.run_dir import open_run_dir
from tests.learner.publishing.finished_run import evaluate, start, train
from tests.learner.publishing.hub_stand_in import TOKEN, hub_stand_in

ROOT = Path(__file__).parents[3]


def export(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", "export", *arguments],
        env=kept | environment, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_card_has_the_config_of_the_exported_step_and_what_resumes_changed_before(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    run = start(tmp_path, optimizer={"learning_rate": 1e-3})
    for step, rate in ((15, 2e-3), (10, 3e-3), (20, 4e-3)):  # step 15 was lost and ran again
        learner = msgspec.structs.replace(
            run.learner, optimizer=msgspec.structs.replace(run.learner.optimizer, learning_rate=rate)
        )
        train(run, accelerator, step)
        with closing(open_run_dir(msgspec.structs.replace(run, learner=learner), resume=True)) as directory:
            directory.begin(step)
    rates = {}
    for step in (10, 15, 20):
        exported = export_run(ExportRequest(run_dir=Path(run.run_dir), checkpoint=str(step)))
        rates[step] = re.findall(r"learning_rate.*", (Path(exported.directory) / "README.md").read_text())
    changed = "learning_rate` | `0.001` | `0.003` |"
    assert rates == {step: ["learning_rate = 0.003", changed] for step in (15, 20)} | {10: ["learning_rate = 0.001"]}


def test_a_run_is_published_by_one_command(accelerator: Accelerator, tmp_path: Path) -> None:
    run = start(tmp_path)
    train(run, accelerator, 10, 20)
    evaluate(run, 10, 0.9)
    evaluate(run, 20, 0.4)
    before = export_run(ExportRequest(run_dir=Path(run.run_dir), best_by="evaluation"))
    arguments = (
        run.run_dir,
        "--checkpoint",
        "best",
        "--best-by",
        "evaluation",
        "--push",
        "me/digits",
        "--quiet",
        "--json",
    )
    with hub_stand_in() as hub:
        settings = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "hub"),
        }
        done = export(*arguments, **settings)
        assert done.returncode == 0, done.stderr
        made, pushed = json.loads(done.stdout), hub.repositories["me/digits"]
    assert (made["step"], made["form"], made["reason"]) == (10, "model", "best of 2 by evaluation: 0.9")
    assert made["url"] == f"{hub.url}/me/digits/commit/{pushed.commits[-1]}"
    assert made["directory"] == before.directory, "what was exported before is pushed"
    files = {path.name: path.read_bytes() for path in Path(made["directory"]).iterdir()}
    card = files["README.md"].replace(b"path/to/this/model", b"me/digits")
    assert pushed.files == files | {".gitattributes": b"", "README.md": card} and "model.safetensors" in files
    assert pushed.private and len(pushed.summaries) == 1 and pushed.summaries[0].startswith("Step 10 of run-")
    assert b'from_pretrained("me/digits"' in card and str(tmp_path).encode() not in card
