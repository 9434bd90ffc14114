"""Loader of the one TOML file that both processes read, with flags on top.

Top-level keys are shared: both sides must see the same values. `[server]`, `[learner]` and `[deploy]` are
private: each program validates its own section and does not read the others. Precedence: flag > file >
default. An unknown key is an error.
"""

import logging
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from protocol import former_keys
from protocol.config_flags import description, with_flags
from protocol.config_keys import MayChange, explain, refuse_unknown_keys
from protocol.endpoint import check_endpoint
from protocol.errors import ConfigError
from protocol.hardware import Dtype, dtype_here

log = logging.getLogger(__name__)

MAX_SECONDS = 1e6
"""Maximum wait: eleven days. A longer value is meant as never, but waits of the operating system count
milliseconds in 32 bits."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
"""Type of a key that bounds a wait."""
Text = Annotated[str, msgspec.Meta(min_length=1)]
"""Type of a key that names something."""
SEEDS = 1 << 32
"""Number of seeds that numpy accepts."""

NO_SWITCHES: Mapping[str, str] = MappingProxyType({})
WARNED = "SLIPSTREAM_WARNED"
"""Environment variable with the last warning about former key names."""
OTHER_SECTIONS = "SLIPSTREAM_OTHER_SECTIONS"
"""Environment variable with keys that flags gave the sections of the other processes, as JSON by section. A process
gets flags of its own section only, but reads a few keys of the others."""

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5757"
DEFAULT_HTTP_PORT = 8000


class SharedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that server and learner must agree on."""

    COMMON: ClassVar[tuple[str, ...]] = ()
    """Keys that most runs set, which the help names first."""
    CONNECTS: ClassVar[bool] = False
    """Whether this side connects to the endpoints, rather than listens at its own."""
    model: Text
    """Model to train: a local directory, a hub name, or a built-in model that is made at first use.
    `tiny:digits`: 0.1M parameters, random weights; `smollm2:135m-instruct`: pretrained, from the package
    index, for machines without a hub."""
    run_dir: MayChange[Text]
    """Directory of this run: metrics, ledger, checkpoints, report."""
    endpoint: MayChange[Text] = DEFAULT_ENDPOINT
    """Address at which the server listens and to which the learner connects. An IPv6 address is in brackets:
    tcp://[::1]:5757."""
    endpoints: MayChange[tuple[Text, ...]] = ()
    """Endpoints of several servers, in place of `endpoint`. Each server gets its own by flag:
    `slipstream serve run.toml --endpoint …`."""
    endpoints_from: MayChange[Text | None] = None
    """Source of the endpoints if servers join and leave, in place of `endpoint`: file:PATH (one endpoint per
    line) or dns:NAME:PORT. The learner reads it again every 5 s."""
    keys: MayChange[Text | None] = None
    """Directory of the CURVE keys that `slipstream keys` made. Required if endpoint is not loopback."""
    insecure: MayChange[bool] = False
    """Whether to allow an endpoint beyond loopback without keys, and server.http_host without an API key. Set
    it only on a private network."""
    dtype: Dtype = msgspec.field(default_factory=dtype_here)
    """Dtype in which both sides compute and weights travel. A server may compute in another one
    (`server.dtype`). Unset: bfloat16 with a GPU, or with a CPU whose AMX or AVX-512 BF16 multiplies it
    faster than float32; float32 elsewhere."""
    head_dtype: Dtype | None = None
    """Dtype in which both sides compute logits from the last hidden states. "float32" with a bfloat16 dtype:
    logits are not rounded, so the two sides differ less, but a CPU server generates more slowly. Unset:
    dtype."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=SEEDS)] = 0
    """Seed of the data order, the sampling and the learner."""

    @property
    def has_float32_head(self) -> bool:
        """True if logits are computed in float32, but everything before them is not."""
        return self.dtype != "float32" and self.head_dtype == "float32"

    @property
    def servers(self) -> tuple[str, ...]:
        """Endpoints that the learner connects to."""
        return self.endpoints or (self.endpoint,)

    def check(self) -> None:
        """Raise ConfigError for errors that only the complete config shows."""


C = TypeVar("C", bound=SharedConfig)


def load_config(
    config_type: type[C],
    argv: Sequence[str],
    program: str,
    switches: Mapping[str, str] = NO_SWITCHES,
    purpose: str | None = None,
    others: Mapping[str, dict[str, Any]] | None = None,
) -> C:
    """Return the config from `run.toml [--section.key value ...]` in `argv`.

    `switches` are the caller's own flags and what each does, for the help. `purpose` is the first text of
    the help, by default the docstring of `config_type`. `others` are keys for the sections of other processes, like
    those in OTHER_SECTIONS.

    Raises:
        ConfigError: The file is missing, a key is unknown, a value has a wrong type or range, or an
            endpoint is open.
    """
    path, flags = _split(argv, program)
    base, in_file = _from_file(config_type, path) if path else (None, {})
    flags, in_flags = former_keys.renamed_flags(flags)
    if former := in_file | in_flags:
        _warn_once(former_keys.describe(former))
    usage = " ".join([program, "run.toml", *(f"[{switch}]" for switch in switches)])
    describe = partial(description, purpose or config_type.__doc__ or "", switches, config_type, config_type.COMMON)
    config = with_flags(config_type, base, flags, usage, switches, describe)
    _refuse_unusable(msgspec.to_builtins(config))
    for sections in (msgspec.json.decode(os.environ.get(OTHER_SECTIONS, "{}")), others or {}):
        config = with_other_sections(config, sections)
    config.check()
    if config.dtype == "float32" and config.head_dtype == "bfloat16":
        raise ConfigError(
            'head_dtype = "bfloat16" is not possible with dtype = "float32": the head must be at least as '
            'precise as the layers before it. Remove head_dtype, or set dtype to "bfloat16"'
        )
    check = partial(
        check_endpoint, has_keys=config.keys is not None, insecure=config.insecure, connects=config.CONNECTS
    )
    check(config.endpoint)
    for endpoint in config.endpoints:
        try:
            check(endpoint)
        except ConfigError as error:
            raise ConfigError(f"endpoints = {list(config.endpoints)}: {error}") from error
    return config


def with_other_sections(config: C, sections: Mapping[str, dict[str, Any]]) -> C:
    """Return the config with these keys in the sections that its program does not validate."""
    tables = {name: getattr(config, name) for name in sections}
    changes = {name: table | sections[name] for name, table in tables.items() if isinstance(table, dict)}
    return msgspec.structs.replace(config, **changes)


def to_toml(config: msgspec.Struct) -> str:
    """Return the resolved config as TOML, without keys that are None.

    TOML has no null.
    """
    return msgspec.toml.encode(_without_none(msgspec.to_builtins(config))).decode()


def _split(argv: Sequence[str], program: str) -> tuple[Path | None, list[str]]:
    if argv and not argv[0].startswith("-"):
        return Path(argv[0]), list(argv[1:])
    if {"-h", "--help"} & set(argv):
        return None, ["--help"]
    raise ConfigError(f"no config file was given; expected: {program} run.toml [--key value ...]")


def _warn_once(text: str) -> None:
    """Log a warning once, even if this process and the processes that it starts load the config several times."""
    if os.environ.get(WARNED) != text:
        os.environ[WARNED] = text
        log.warning("%s", text)


def read_toml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tables of a config file, and the former key names in it, with today's. Raises ConfigError."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist; copy a recipe from deploy/recipes/") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    try:
        return former_keys.renamed(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _from_file(config_type: type[C], path: Path) -> tuple[C, dict[str, str]]:
    """Return the config, and the former key names in the file, with today's."""
    raw, former = read_toml(path)
    refuse_unknown_keys(config_type, raw, str(path))
    try:
        return msgspec.convert(raw, config_type), former
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {explain(str(error), raw, config_type)}") from error


def _refuse_unusable(value: Any, key: str = "") -> None:
    """Refuse a value of the right type that is never valid, at any depth.

    Raises:
        ConfigError: A number is NaN, or a text has a NUL or cannot be written as UTF-8.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_unusable(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_unusable(inner, key)
    elif isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{key} = nan is not a number; set it to a number, or remove it")
    elif isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
        raise ConfigError(f"{key} = {value!r} has a character that no name or path may have; remove it")


def _is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8.

    A flag may hold bytes that cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value
