"""Loader of the one TOML file that both processes read, with flags on top.

Top-level keys are shared: both sides must see the same values. `[server]`, `[learner]` and `[deploy]` are
private: each program validates its own section and does not read the others. Precedence: flag > file >
default. An unknown key is an error.
"""

import contextlib
import difflib
import io
import logging
import math
import os
import re
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import tyro

from protocol import former_keys
from protocol.endpoint import check_endpoint
from protocol.errors import ConfigError
from protocol.hardware import Dtype, dtype_here

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_SECONDS = 1e8
"""Maximum wait: three years. A longer value is meant as never, which waits of the operating system do not
support."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
"""Type of a key that bounds a wait."""
Text = Annotated[str, msgspec.Meta(min_length=1)]
"""Type of a key that names something."""
SEEDS = 1 << 32
"""Number of seeds that numpy accepts."""

MAY_CHANGE = "may change at a resume"
MayChange = Annotated[T, MAY_CHANGE]
"""Type of a key that a resume may change. Such a key does not decide what is learned, or an error or a
warning advises to change it. All other keys are fixed when the run starts."""

PASSED_ON = "passed on"
"""Marker of a section whose names are not defined here. Its type states what this program knows about the
values."""
PassedOn = Annotated[dict[str, Any], PASSED_ON, tyro.conf.Suppress]
"""Type of a section that a library defines. Its names and TOML values are free. A flag is `--section.name
VALUE`."""

NO_SWITCHES: Mapping[str, str] = MappingProxyType({})
WARNED = "SLIPSTREAM_WARNED"
"""Environment variable with the last warning about former key names."""

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5757"
DEFAULT_HTTP_PORT = 8000


class SharedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that server and learner must agree on."""

    COMMON: ClassVar[tuple[str, ...]] = ()
    """Keys that most runs set, which the help names first."""
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
) -> C:
    """Return the config from `run.toml [--section.key value ...]` in `argv`.

    `switches` are the caller's own flags and what each does, for the help. `purpose` is the first text of
    the help, by default the docstring of `config_type`.

    Raises:
        ConfigError: If the file is missing, a key is unknown, a value has a wrong type or range, or an
            endpoint is open.
    """
    path, flags = _split(argv, program)
    base, in_file = _from_file(config_type, path) if path else (None, {})
    flags, in_flags = former_keys.renamed_flags(flags)
    if former := in_file | in_flags:
        _warn_once(former_keys.describe(former))
    usage = " ".join([program, "run.toml", *(f"[{switch}]" for switch in switches)])
    describe = partial(_description, config_type, switches, purpose)
    config = _with_flags(config_type, base, flags, usage, switches, describe)
    _refuse_unusable(msgspec.to_builtins(config))
    config.check()
    if config.dtype == "float32" and config.head_dtype == "bfloat16":
        raise ConfigError(
            'head_dtype = "bfloat16" is not possible with dtype = "float32": the head must be at least as '
            'precise as the layers before it. Remove head_dtype, or set dtype to "bfloat16"'
        )
    check_endpoint(config.endpoint, has_keys=config.keys is not None, insecure=config.insecure)
    for endpoint in config.endpoints:
        try:
            check_endpoint(endpoint, has_keys=config.keys is not None, insecure=config.insecure)
        except ConfigError as error:
            raise ConfigError(f"endpoints = {list(config.endpoints)}: {error}") from error
    return config


def to_toml(config: msgspec.Struct) -> str:
    """Return the resolved config as TOML, without keys that are None.

    TOML has no null.
    """
    return msgspec.toml.encode(_without_none(msgspec.to_builtins(config))).decode()


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, msgspec.structs.FieldInfo]:
    """Return all keys, those of a section with its name: `learner.loss.clip_low`."""
    keys: dict[str, msgspec.structs.FieldInfo] = {}
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys |= keys_of(field.type, f"{prefix}{field.name}.")
        else:
            keys[prefix + field.name] = field
    return keys


def may_change(field: msgspec.structs.FieldInfo) -> bool:
    """Return whether a resume may change this key."""
    return MAY_CHANGE in getattr(field.type, "__metadata__", ())


def is_passed_on(field: msgspec.structs.FieldInfo) -> bool:
    """Return whether this is a section whose names and types a library defines."""
    return PASSED_ON in getattr(field.type, "__metadata__", ())


def _description(config_type: type[SharedConfig], switches: Mapping[str, str], purpose: str | None) -> str:
    from protocol.help_text import description  # only --help needs it

    return description(purpose or config_type.__doc__ or "", switches, config_type, config_type.COMMON)


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


def _from_file(config_type: type[C], path: Path) -> tuple[C, dict[str, str]]:
    """Return the config, and the former key names in the file, with today's."""
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist; copy a recipe from deploy/recipes/") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    try:
        raw, former = former_keys.renamed(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    _refuse_unknown_keys(config_type, raw, str(path), prefix="")
    try:
        return msgspec.convert(raw, config_type), former
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(str(error), raw)}") from error


def _refuse_unknown_keys(struct: type[msgspec.Struct], raw: dict[str, Any], path: str, prefix: str) -> None:
    """Raise ConfigError for an unknown key, with a suggestion.

    This runs before msgspec, whose error names the section but suggests nothing.
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in raw.items():
        if key not in fields:
            hint = _suggest(struct, key, value, prefix)
            raise ConfigError(f"{path}: unknown key {prefix}{key} = {value!r}; {hint}")
        section = fields[key]
        if isinstance(section, type) and issubclass(section, msgspec.Struct) and isinstance(value, dict):
            _refuse_unknown_keys(section, value, path, f"{prefix}{key}.")
        elif (inner := _section_of_each(section)) is not None and isinstance(value, dict):
            for name, table in value.items():
                if isinstance(table, dict):
                    _refuse_unknown_keys(inner, table, path, f"{prefix}{key}.{name}.")


def _suggest(struct: type[msgspec.Struct], key: str, value: object, prefix: str) -> str:
    fields = {field.name for field in msgspec.structs.fields(struct)}
    if isinstance(value, dict) and value and fields.issuperset(value):
        return f"set {', '.join(value)} directly in {prefix.removesuffix('.') or 'the file'}, without a section {key}"
    inside = [name for name in keys_of(struct) if name.endswith(f".{key}")]
    near = inside or difflib.get_close_matches(key, fields, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(sorted(fields))}"


def _section_of_each(annotated: Any) -> type[msgspec.Struct] | None:
    """Return the section type of a table of sections with user-defined names.

    Such a table is a dict[str, Section]. Return None for other types.
    """
    values = get_args(get_args(annotated)[0])[1:] if PASSED_ON in getattr(annotated, "__metadata__", ()) else ()
    is_section = values and isinstance(values[0], type) and issubclass(values[0], msgspec.Struct)
    return values[0] if is_section else None


def _explain(message: str, raw: dict[str, Any]) -> str:
    """Add the received value to an error of msgspec.

    Example: `Expected int, got str - at $.learner.steps`.
    """
    problem, _, location = message.partition(" - at `$")
    keys = location.replace("...", "").strip("`.").split(".") if location else []
    found: list[tuple[str, Any]] = [("", raw)]
    for key in keys:
        name, _, index = key.partition("[")
        found = [(f"{at}.{name}", value.get(name)) if isinstance(value, dict) else (at, value) for at, value in found]
        if index and isinstance(found[0][1], dict):  # in a table of sections, msgspec does not name which one
            found = [(f"{at}.{one}", section) for at, table in found for one, section in table.items()]
    if problem.startswith("Expected") or not any(isinstance(value, dict) for _, value in found):
        assignments = [f"{at[1:]} = {value!r}" for at, value in found if value is not None or len(found) == 1]
        return f"{', '.join(assignments)}: {problem}"
    # A section's own checks start with one of its keys, msgspec's with a capital letter.
    return ".".join([*keys, problem]) if problem[0].islower() else message


def _refuse_unusable(value: Any, key: str = "") -> None:
    """Refuse a value of the right type that is never valid, at any depth.

    Raises:
        ConfigError: If a number is NaN, or a text has a NUL or cannot be written as UTF-8.
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


def _with_flags(
    config_type: type[C],
    base: C | None,
    flags: list[str],
    usage: str,
    switches: Iterable[str],
    describe: Callable[[], str],
) -> C:
    if base is not None and not flags:
        return base
    flags, passed_on = _split_passed_on(config_type, flags)
    _refuse_unknown_flags(config_type, flags, switches)
    flags = _spell_out_booleans(config_type, flags)
    _refuse_wrong_number_of_values(config_type, flags)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            default = tyro.MISSING_NONPROP if base is None else base
            conversions = (tyro.conf.FlagConversionOff,)
            text = describe() if {"-h", "--help"} & set(flags) else None
            config = tyro.cli(
                config_type, args=flags, prog=usage, description=text, default=default, config=conversions
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise ConfigError(_plain(config_type, flags, complaint.getvalue())) from exit_
    # Tyro builds the structs field by field. Only a conversion runs every check again.
    raw = msgspec.to_builtins(config)
    for path, value in passed_on:
        _set(raw, path, value)
    try:
        return msgspec.convert(raw, config_type)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), raw)) from error


def _split_passed_on(
    config_type: type[msgspec.Struct], flags: list[str]
) -> tuple[list[str], list[tuple[list[str], Any]]]:
    """Return the flags that tyro knows, then path and value of each other flag.

    Raises:
        ConfigError: If a flag has no value.
    """
    sections = tuple(f"--{key}." for key, field in keys_of(config_type).items() if is_passed_on(field))
    known, passed_on = [], []
    waiting = iter(flags)
    for flag in waiting:
        if not sections or not flag.startswith(sections):
            known.append(flag)
            continue
        name, has_value, text = flag.partition("=")
        value = text if has_value else next(waiting, "--")
        if value.startswith("--"):
            raise ConfigError(f"{name} has no value; expected: {name} VALUE, or {name} true for a boolean")
        passed_on.append((name.removeprefix("--").replace("-", "_").split("."), _toml_value(value)))
    return known, passed_on


def _spell_out_booleans(config_type: type[msgspec.Struct], flags: list[str]) -> list[str]:
    """Give each boolean flag an explicit value, which tyro requires.

    Such a flag may stand alone, or before true or false.

    Raises:
        ConfigError: If another word follows it.
    """
    names = {_flag_of(key) for key, field in keys_of(config_type).items() if _is_boolean(field)}
    spelled, left = [], deque(flags)
    while left:
        flag = left.popleft()
        name, has_value, word = flag.partition("=")
        if name not in names:
            spelled.append(flag)
            continue
        if not has_value:
            word = left.popleft() if left and not left[0].startswith("-") else "true"
        if word.lower() not in ("true", "false"):
            raise ConfigError(f"{name} {word} is not a boolean; use {name} true or {name} false ({name} alone is true)")
        spelled += [name, word.capitalize()]
    return spelled


def _is_boolean(field: msgspec.structs.FieldInfo) -> bool:
    return getattr(field.type, "__origin__", field.type) is bool  # for Annotated, the annotated type


def _toml_value(text: str) -> Any:
    """Return a TOML value. A word without quotes is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(raw: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, name = path
    for section in sections:
        if not isinstance(raw.get(section), dict):
            raw[section] = {}
        raw = raw[section]
    raw[name] = value


def _flag_of(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _refuse_unknown_flags(config_type: type[msgspec.Struct], flags: list[str], switches: Iterable[str]) -> None:
    """Raise ConfigError for a flag of no key, and for a key that only the file can set."""
    keys = {key: field for key, field in keys_of(config_type).items() if not is_passed_on(field)}
    in_file = [_flag_of(key) for key, field in keys.items() if _is_only_in_file(field)]
    known = {"--help", "-h", *(_flag_of(key) for key in keys)} - set(in_file)
    for name, _ in _with_values(flags):
        if not name or name in known:
            continue
        if any(name == flag or name.startswith(f"{flag}.") for flag in in_file):
            key = name.removeprefix("--").replace("-", "_")
            raise ConfigError(
                f"{name} is no flag of this command; set {key} in the config file, or see --help for all flags"
            )
        near = difflib.get_close_matches(name, [*known, *switches], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see --help for all flags"
        raise ConfigError(f"unknown flag {name}; {hint}")


def _refuse_wrong_number_of_values(config_type: type[msgspec.Struct], flags: list[str]) -> None:
    """Raise ConfigError for a flag without its value, and for a word that belongs to no flag."""
    types = {_flag_of(key): field.type for key, field in keys_of(config_type).items()}
    for name, values in _with_values(flags):
        if not name:
            raise ConfigError(f"{values[0]!r} belongs to no flag; expected: --key VALUE after the config file")
        if name not in types or _takes_several(types[name]):
            continue
        expected = _expected(types[name])
        if not values:
            raise ConfigError(
                f"{name} has no value; use {name} VALUE with {expected} ({name}=VALUE if it begins with -)"
            )
        if len(values) > 1:
            raise ConfigError(
                f"{name} got {len(values)} values: {' '.join(values)}; use one, {expected}, in quotes if it has spaces"
            )


def _with_values(flags: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag and the words after it; words before the first flag come with an empty name."""
    name, values = "", list[str]()
    for word in flags:
        if not word.startswith("-") or _is_number(word):
            values.append(word)
            continue
        if name or values:
            yield name, values
        name, has_value, value = word.partition("=")
        values = [value] if has_value else []
    if name or values:
        yield name, values


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_only_in_file(field: msgspec.structs.FieldInfo) -> bool:
    return tyro.conf.Suppress in getattr(field.type, "__metadata__", ())


def _takes_several(annotated: Any) -> bool:
    return get_origin(annotated) is tuple or any(_takes_several(inner) for inner in get_args(annotated))


def _expected(annotated: Any) -> str:
    """Describe the values of a type, such as `an integer or auto`."""
    origin, inner = get_origin(annotated), get_args(annotated)
    if origin is Annotated:
        return _expected(inner[0])
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin is tuple:
        return f"any number of values, each {_expected(inner[0])}"
    if origin in (Union, UnionType):
        return " or ".join(_expected(one) for one in inner)
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}.get(annotated, "None")


def _plain(config_type: type[msgspec.Struct], flags: list[str], box: str) -> str:
    """Return the error in tyro's box without tyro's own phrases."""
    lines = (line.strip("│╭╮╰╯─ \n") for line in box.splitlines())
    text = " ".join(line for line in lines if line).removeprefix("Value error ").partition(" For full helptext")[0]
    types = {_flag_of(key): field.type for key, field in keys_of(config_type).items()}
    for name, values in _with_values(flags):
        if re.search(rf"(Error parsing |argument '){name}[:']", text):
            return f"{name} {' '.join(values) or repr('')} is not valid; use {_expected(types[name])}"
    return re.sub(r"^Error parsing ([\w.]+): ", r"\1.", text)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value
