"""Push of an exported directory to the Hugging Face hub, by huggingface_hub.

    login ─▶ repository: made, or found with the same visibility ─▶ large files, deduplicated ─▶ one commit

Invariant: the repository changes in one commit, with all files or not at all. A push that broke off continues
where it was when it is run again, because the hub keeps the large files that it has received.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_session, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from protocol.console import output_mode
from protocol.errors import ConfigError, SlipstreamError

RESPONSE_TIMEOUT_S = 300.0
"""Seconds without a byte after which a request has failed. The library itself would wait forever."""
REPLACED = ("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json")
"""Files at the root, of an earlier push, that would be loaded in place of, or together with, those of this one."""


class HubError(SlipstreamError):
    """The hub refused a request, or could not be reached."""


def check_repo_name(repo: str) -> None:
    """Raise ConfigError unless the name is ORG/NAME, as the hub allows it."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--push {repo}: {error}") from error
    if "/" not in repo:
        raise ConfigError(f"--push {repo} names no user or organization; use ORG/NAME")


def log_in() -> None:
    """Check the token, and give every request a deadline.

    Raises:
        HubError: There is no valid token, or the hub cannot be reached.
    """
    plain = get_session()
    client, hooks = type(plain), plain.event_hooks

    def make_client() -> Any:
        return client(event_hooks=hooks, follow_redirects=True, timeout=RESPONSE_TIMEOUT_S)

    set_client_factory(make_client)
    if not output_mode().has_bars:
        disable_progress_bars()
    with _explained("the token cannot be checked"):
        HfApi().whoami()


def push(directory: Path, repo: str, changed: Mapping[str, bytes], *, is_public: bool, summary: str) -> str:
    """Push the files of a directory in one commit; return the URL of the commit.

    `changed`: contents, by name, of those files that are pushed in another form.
    A new repository is private unless `is_public`. The visibility of an existing one never changes.

    Raises:
        ConfigError: The repository exists with another visibility.
        HubError: The push did not complete. Run again, it continues.
    """
    api = HfApi()
    with _explained(f"{repo} was not pushed"):
        api.create_repo(repo, private=not is_public, exist_ok=True)
        found = api.model_info(repo, timeout=RESPONSE_TIMEOUT_S)  # its default is none
    if bool(found.private) == is_public:
        raise ConfigError(
            f"{repo} exists and is {'private' if found.private else 'public'}; "
            f"{'omit' if found.private else 'add'} --public, or change its visibility in its settings on the hub"
        )
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    before = {sibling.rfilename for sibling in found.siblings or ()}
    at_root = {name for name in before - files.keys() if "/" not in name}
    obsolete = {name for name in at_root if any(fnmatch(name, pattern) for pattern in REPLACED)}
    with _explained(f"the push to {repo} did not complete"):
        return api.create_commit(
            repo,
            [
                *(
                    CommitOperationAdd(path_in_repo=name, path_or_fileobj=changed.get(name, path))
                    for name, path in files.items()
                ),
                *(CommitOperationDelete(path_in_repo=name) for name in sorted(obsolete)),
            ],
            commit_message=summary,
            parent_commit=found.sha,  # fails if others have pushed since the files were compared
        ).commit_url


@contextmanager
def _explained(what_failed: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub, of its transports and of the disk into HubError."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        # For a large file, the library raises a RuntimeError without the reason.
        cause = error.__cause__ if isinstance(error, RuntimeError) else None
        raise HubError(f"{what_failed}: {_reason(cause or error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token of the hub; run `hf auth login`, or set HF_TOKEN to a token that may write"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    if isinstance(error, HfHubHTTPError):
        status, answer = error.response.status_code, error.server_message or str(error).strip().splitlines()[0]
        remedy = {
            401: "run `hf auth login`, or set HF_TOKEN to a valid token",
            403: "use a token that may write to this user or organization (`hf auth login`)",
            404: "check the name, and that the token may write there",
            409: "run the same command again",
            412: "others pushed at the same time; run the same command again",
        }.get(status, "run the same command again, which continues where this one ended")
        return f"{constants.ENDPOINT} answered with status {status} ({answer}); {remedy}"
    if isinstance(error, json.JSONDecodeError):
        return f"{constants.ENDPOINT} does not answer as the hub does; check HF_ENDPOINT and HTTPS_PROXY"
    if isinstance(error, ValueError):  # the library, or the hub, has refused the content of a file
        return f"{' '.join(str(error).split())}; mend that file, then run the same command again"
    text = str(error).strip().splitlines()
    detail = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return (
        f"{detail}, at {constants.ENDPOINT}; check the network (HF_ENDPOINT, HTTPS_PROXY), then run the same command "
        "again, which continues where this one ended"
    )
