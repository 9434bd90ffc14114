"""Pushes by the real huggingface_hub, in processes of their own, to a local stand-in of the hub's API."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.learner.publishing.hub_stand_in import HANG_UP, READER, SILENCE, TOKEN, HubStandIn, Repository, hub_stand_in
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
SECOND = b"two" * 999
CARD = b"---\nlibrary_name: transformers\n---\n# A model\n"
SCRIPT = """
import sys
from pathlib import Path
from learner.publishing import hub
from protocol import console
console.pop_switches(["--quiet"])
hub.RESPONSE_TIMEOUT_S = float(sys.argv[4])
with console.exit_on_user_error():
    hub.check_repo_name(sys.argv[2])
    hub.log_in()
    print(hub.push(Path(sys.argv[1]), sys.argv[2], {}, is_public=sys.argv[3] == "public", summary="Step 7"))
"""


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with hub_stand_in() as hub:
        yield hub


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    directory = tmp_path / "exported"
    directory.mkdir()
    files = {
        "README.md": CARD,
        "config.json": b"{}",
        "model-1.safetensors": b"one" * 999,
        "model-2.safetensors": SECOND,
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def push(
    url: str,
    directory: Path,
    repo: str = "me/model",
    visibility: str = "private",
    token: str | None = TOKEN,
    timeout_s: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Push in a new process. The protocol is git-lfs, because the stand-in has no Xet storage."""
    settings = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(directory.parent / "hub")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), repo, visibility, str(timeout_s)],
        env=environment | settings | ({"HF_TOKEN": token} if token else {}),
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(part in last for part in parts), last
    assert TOKEN not in done.stdout + done.stderr


def test_a_push_is_one_commit_to_a_new_private_repository(hub: HubStandIn, exported: Path) -> None:
    done = push(hub.url, exported)
    made = hub.repositories["me/model"]
    assert done.stdout.strip() == f"{hub.url}/me/model/commit/{made.commits[-1]}", done.stderr
    assert made.private and made.summaries == ["Step 7"]
    assert made.files == content_of(exported) | {".gitattributes": b""}


def test_a_push_replaces_weights_of_an_earlier_one_and_keeps_files_of_others(hub: HubStandIn, exported: Path) -> None:
    before = hub.repositories["me/model"] = Repository(private=True)
    kept = {"notes.md": b"mine", "onnx/model.safetensors": b"of another", ".gitattributes": b""}
    before.files |= kept | {
        "model.safetensors": b"old", "model.safetensors.index.json": b"old", "adapter_config.json": b"old",
        "config.json": b"old",
    }  # fmt: skip
    assert push(hub.url, exported).returncode == 0
    assert before.files == kept | content_of(exported) and len(before.summaries) == 1


@pytest.mark.parametrize(
    ("failing", "status", "remedy"),
    [
        (
            f"PUT /lfs/{hashlib.sha256(SECOND).hexdigest()}",
            400,
            "status 400",
        ),  # the library itself retries a lost connection here
        ("POST /api/models/me/model/commit", HANG_UP, "check the network"),
        ("POST /api/models/me/model/preupload", 413, "status 413"),
    ],
    ids=["large file", "commit", "start"],
)
def test_a_push_that_breaks_off_publishes_nothing_and_continues_when_run_again(
    hub: HubStandIn, exported: Path, failing: str, status: int, remedy: str
) -> None:
    hub.failures = {failing: status}
    assert_refused(
        push(hub.url, exported), "the push to me/model did not complete", remedy, "run the same command again"
    )
    made = hub.repositories["me/model"]
    assert made.summaries == [] and made.files == {".gitattributes": b""}
    hub.failures = {}
    assert push(hub.url, exported).returncode == 0
    assert made.summaries == ["Step 7"] and made.files == content_of(exported) | {".gitattributes": b""}
    assert hub.num_uploads == 2, "no large file was sent twice"


def test_a_push_of_what_is_there_already_makes_no_commit(hub: HubStandIn, exported: Path) -> None:
    first, second = (push(hub.url, exported) for _ in range(2))
    assert (first.returncode, second.returncode, first.stdout) == (0, 0, second.stdout)
    assert hub.repositories["me/model"].summaries == ["Step 7"] and hub.num_uploads == 2


def test_who_may_not_push_learns_why(hub: HubStandIn, exported: Path) -> None:
    assert_refused(push(hub.url, exported, token=None), "no token", "hf auth login", "HF_TOKEN")
    assert_refused(push(hub.url, exported, token="hf_wrong"), "status 401", "set HF_TOKEN to a valid token")
    assert_refused(push(hub.url, exported, token=READER), "me/model was not pushed", "status 403", "may write")
    assert_refused(push(hub.url, exported, repo="others/model"), "others/model", "status 403", "may write")
    assert hub.repositories == {}


def test_the_visibility_of_a_repository_is_never_assumed(hub: HubStandIn, exported: Path) -> None:
    hub.repositories = {"me/model": Repository(private=False), "me/hidden": Repository(private=True)}
    assert_refused(push(hub.url, exported), "me/model exists and is public; add --public")
    assert_refused(push(hub.url, exported, "me/hidden", "public"), "me/hidden exists and is private; omit --public")
    assert all(not one.summaries for one in hub.repositories.values())
    assert push(hub.url, exported, "me/new", "public").returncode == 0 and not hub.repositories["me/new"].private


def test_a_hub_that_cannot_be_reached_or_refuses_the_card_is_named(hub: HubStandIn, exported: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert_refused(push(nowhere, exported), "the token cannot be checked", nowhere, "check the network")
    (exported / "README.md").write_text("---\nbase_model: [\n---\n")
    assert_refused(push(hub.url, exported), "did not complete", "README.md", "mend that file")
    assert_refused(push(hub.url, exported, repo="model"), "ORG/NAME")
    assert_refused(push(hub.url, exported, repo="me/a model"), "--push me/a model")


@pytest.mark.parametrize(
    "request_line", ["GET /api/whoami", "POST /api/repos", "GET /api/models", "POST /api/models/me/model/commit"]
)
def test_a_hub_that_falls_silent_ends_the_push(hub: HubStandIn, exported: Path, request_line: str) -> None:
    hub.failures = {request_line: SILENCE}
    assert_refused(push(hub.url, exported, timeout_s=2), "ReadTimeout", "run the same command again")
