"""The command `slipstream export`: a checkpoint of a run becomes a directory, and with --push a repository.

    RUN_DIR ─▶ checkpoint_choice.py ─▶ export.py, model_card.py ─▶ directory ─▶ hub.py ─▶ commit

An export that exists is not written again, so a push that failed continues, and a card may be edited before it
is pushed. Invariant: a directory with other contents is never changed.
"""

import datetime
import logging
import tomllib
from pathlib import Path

import msgspec

from learner.config import LearnerRun
from learner.publishing import hub
from learner.publishing.checkpoint_choice import BEST, LATEST, ChosenCheckpoint, choose_checkpoint
from learner.publishing.export import Form, complete_directory, write_adapter, write_model
from learner.publishing.model_card import PLACEHOLDER, CardInputs, make_card
from learner.publishing.public_config import hub_name
from learner.storage.checkpoint import TRAINED
from learner.storage.run_dir import STARTS, starts_before
from protocol.config import load_config
from protocol.errors import ConfigError
from protocol.former_keys import renamed

log = logging.getLogger(__name__)

ORIGIN_FILE = "slipstream.json"


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the command."""

    run_dir: Path
    directory: Path | None = None
    """Directory to write. None: in `exports` of the run directory."""
    checkpoint: str | None = None
    """"latest", "best" or a step. None: "best" with `best_by`, otherwise "latest"."""
    best_by: str | None = None
    merge: bool = False
    dtype: str | None = None
    base: str | None = None
    push: str | None = None
    public: bool = False


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What an exported directory was made from."""

    run_id: str
    step: int
    written: str
    """Time of the checkpoint, which tells the same step of a resumed run apart."""
    form: Form
    dtype: str
    base: str | None


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the command."""

    directory: str
    step: int
    reason: str
    form: Form
    url: str | None = None
    """Commit on the hub."""


def export_run(request: ExportRequest) -> Exported:
    """Export a checkpoint, and push it if asked to.

    Raises:
        SlipstreamError: The run, the checkpoint or the arguments do not allow it, or the hub does not.
    """
    run = _config_of(request.run_dir)
    _check(request, run)
    chosen = choose_checkpoint(
        request.run_dir,
        Path(run.learner.checkpoint.dir or request.run_dir / "checkpoints"),
        request.checkpoint or (BEST if request.best_by else LATEST),
        request.best_by or run.learner.checkpoint.best_by,
    )
    form: Form = "adapter" if run.learner.lora.rank and not request.merge else "model"
    base = request.base or hub_name(run.model, request.run_dir)
    if request.push:
        if form == "adapter" and base is None:
            raise ConfigError(
                f"--push: model = {run.model!r} is not on the hub, so nobody could load an adapter for it; name its "
                "base there with --base ORG/NAME, or use --merge"
            )
        hub.check_repo_name(request.push)
        hub.log_in()
    origin = Origin(
        run_id=_run_id(request.run_dir),
        step=chosen.step,
        written=_time_of(chosen.path),
        form=form,
        dtype=request.dtype or _dtype_of(form, run),
        base=base,
    )
    directory = (request.directory or request.run_dir / "exports" / _name_of(origin, run)).resolve()
    if _is_new(directory, origin):
        _write(request, run, chosen, origin, directory)
    else:
        log.info("%s is this export already; not written again", directory)
    url = None
    if request.push:
        summary = f"Step {chosen.step} of {origin.run_id}, {form}"
        card = _card_for(request.push, directory)
        url = hub.push(directory, request.push, card, is_public=request.public, summary=summary)
    return Exported(directory=str(directory), step=chosen.step, reason=chosen.reason, form=form, url=url)


def _config_of(run_dir: Path) -> LearnerRun:
    path = run_dir / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run_dir} is not a run directory: config.toml is missing; use the run_dir of a run")
    return load_config(LearnerRun, [str(path)], "slipstream export")


def _configs_until(run_dir: Path, step: int) -> list[tuple[int, LearnerRun]]:
    """Return the configs of the steps up to `step`, each with the step after which it applied."""
    try:
        return [
            (start.step, msgspec.convert(renamed(tomllib.loads(start.config))[0], LearnerRun))
            for start in starts_before(run_dir, step)
        ]
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{run_dir / STARTS} contains a config that this version cannot read ({error}); export with the version "
            "that trained the run, or move the file away"
        ) from error


def _check(request: ExportRequest, run: LearnerRun) -> None:
    if request.merge and not run.learner.lora.rank:
        raise ConfigError(
            f"--merge: the run in {request.run_dir} has trained the whole model, so there is no adapter to merge; omit "
            "--merge"
        )
    if request.best_by and request.checkpoint not in (None, BEST):
        raise ConfigError(f"--best-by {request.best_by} with --checkpoint {request.checkpoint}: keep one of them")
    if request.public and not request.push:
        raise ConfigError("--public needs --push ORG/NAME; add it, or omit --public")


def _write(request: ExportRequest, run: LearnerRun, chosen: ChosenCheckpoint, origin: Origin, directory: Path) -> None:
    configs = _configs_until(request.run_dir, chosen.step)
    card = make_card(
        CardInputs(
            name=request.run_dir.resolve().name,
            run=configs[-1][1] if configs else run,
            configs=configs,
            run_dir=request.run_dir,
            step=chosen.step,
            reason=chosen.reason,
            form=origin.form,
            dtype=origin.dtype,
            base=origin.base,
        )
    )
    with complete_directory(directory) as aside:
        if origin.form == "model":
            write_model(run, chosen.path, origin.dtype, aside)
        else:
            write_adapter(run, chosen.path, origin.base or run.model, origin.dtype, aside)
        (aside / "README.md").write_text(str(card), "utf-8")
        (aside / ORIGIN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(origin)) + b"\n")


def _card_for(repo: str, directory: Path) -> dict[str, bytes]:
    """Return the card as it is pushed to a repository. It is absent if the user has removed it."""
    card = directory / "README.md"
    return {card.name: card.read_bytes().replace(PLACEHOLDER.encode(), repo.encode())} if card.is_file() else {}


def _is_new(directory: Path, origin: Origin) -> bool:
    """Return whether the directory has to be written, or is this export already.

    Raises:
        ConfigError: The directory has other contents, or is the current one.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        if directory == Path.cwd():  # it would be replaced, and the user's shell would stay in the old one
            raise ConfigError(f"{directory} is the current directory; choose another one, such as {directory}/model")
        return True
    try:
        found = msgspec.json.decode((directory / ORIGIN_FILE).read_bytes(), type=Origin)
    except (OSError, msgspec.DecodeError):
        raise ConfigError(f"{directory} exists and is not an export; choose another directory") from None
    if found != origin:
        raise ConfigError(
            f"{directory} has another export (step {found.step} of {found.run_id}, {found.form}, {found.dtype}); "
            "remove it, or choose another directory"
        )
    return False


def _name_of(origin: Origin, run: LearnerRun) -> str:
    kind = "" if not run.learner.lora.rank else "-adapter" if origin.form == "adapter" else "-merged"
    dtype = f"-{origin.dtype}" if origin.dtype != _dtype_of(origin.form, run) else ""
    return f"step-{origin.step:06d}{kind}{dtype}"


def _dtype_of(form: Form, run: LearnerRun) -> str:
    """Return the dtype of an export by default. An adapter is trained in float32."""
    return run.dtype if form == "model" else "float32"


def _run_id(run_dir: Path) -> str:
    path = run_dir / "run_id"
    return path.read_text("utf-8").strip() if path.is_file() else run_dir.resolve().name


def _time_of(checkpoint: Path) -> str:
    """Return when a checkpoint was written. It stays the same when only the model is kept.

    Raises:
        ConfigError: The checkpoint has no weights.
    """
    files = ("model/config.json", f"{TRAINED}/index.json")
    newest = next((path for name in files if (path := checkpoint / name).is_file()), None)
    if newest is None:
        raise ConfigError(f"{checkpoint} has neither model/ nor {TRAINED}/; export another checkpoint")
    return datetime.datetime.fromtimestamp(newest.stat().st_mtime, datetime.UTC).isoformat(timespec="seconds")
