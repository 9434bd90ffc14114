"""Precedence flag > file > default, and errors that name key, value and remedy."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import tyro

from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol.config import SharedConfig, load_config, to_toml
from protocol.config_keys import PassedOn
from protocol.errors import ConfigError


class Loss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss."""

    clip_low: float = 0.2
    """Lower clip."""
    kind: Literal["a", "b"] = "a"
    """Kind."""
    fused: bool | Literal["auto"] = "auto"
    """Fused."""

    def __post_init__(self) -> None:
        if self.clip_low < 0:
            raise ValueError(f"clip_low = {self.clip_low} must not be negative")


class Side(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side."""

    steps: int
    """Steps."""
    names: tuple[str, ...] = ("x",)
    """Names."""
    cores: tuple[int, ...] | None = None
    """Cores."""
    sides: tuple[Literal["left", "right"], ...] = ()
    """Sides."""
    loss: Loss = Loss()
    library: PassedOn = msgspec.field(default_factory=dict)
    """A library's own."""


class Run(SharedConfig):
    """A run."""

    learner: Side
    """One side."""
    server: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    only_in_file: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """The other side."""


TOML = 'model = "m"\nrun_dir = "r"\n[learner]\nsteps = 3\n'


def load(tmp_path: Path, toml: str, *flags: str) -> Run:
    path = tmp_path / "run.toml"
    path.write_text(toml)
    return load_config(Run, [str(path), *flags], "learner train", {"--resume": "continue"})


def test_a_head_may_be_finer_than_what_is_before_it_and_not_coarser(tmp_path: Path) -> None:
    assert load(tmp_path, 'dtype = "bfloat16"\nhead_dtype = "float32"\n' + TOML).has_float32_head
    assert not load(tmp_path, 'dtype = "float32"\nhead_dtype = "float32"\n' + TOML).has_float32_head
    assert not load(tmp_path, 'dtype = "bfloat16"\n' + TOML).has_float32_head
    refusal = r'head_dtype = "bfloat16" is not possible with dtype = "float32".*Remove head_dtype'
    with pytest.raises(ConfigError, match=refusal):
        load(tmp_path, 'dtype = "float32"\nhead_dtype = "bfloat16"\n' + TOML)


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    toml = TOML + "[learner.loss]\nclip_low = 0.1\n"
    assert load(tmp_path, TOML).learner.loss.clip_low == 0.2
    assert load(tmp_path, toml).learner.loss.clip_low == 0.1
    run = load(tmp_path, toml, "--learner.loss.clip-low", "0.3", "--learner.names", "p", "q", "--seed", "7")
    assert (run.learner.loss.clip_low, run.learner.names, run.seed, run.learner.steps) == (0.3, ("p", "q"), 7, 3)


def test_the_resolved_config_reads_back_as_the_same(tmp_path: Path) -> None:
    run = load(tmp_path, TOML, "--learner.cores", "1", "2")
    assert load(tmp_path, to_toml(run)) == run


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        (TOML + "stesp = 4\n", r"unknown key learner\.stesp = 4; did you mean learner\.steps\?"),
        ("modle = 1\n" + TOML, r"unknown key modle = 1; did you mean model\?"),
        (TOML + "[learner.loss]\nzzz = 1\n", r"unknown key learner\.loss\.zzz = 1; known keys: clip_low, fused, kind"),
        (TOML + "clip_low = 0.1\n", r"unknown key learner\.clip_low = 0\.1; did you mean learner\.loss\.clip_low\?"),
        (TOML + "[learner.data]\nsteps = 4\n", r"\.data = {'steps': 4}; set steps directly in learner, without"),
        (TOML.replace("3", '"three"'), r"learner\.steps = 'three': Expected `int`"),
        (TOML + '[learner.loss]\nkind = "c"', r"run\.toml: learner\.loss\.kind = 'c' is not valid; use a or b$"),
        (
            TOML + 'sides = ["left", "up"]',
            r"learner\.sides = \['left', 'up'\] is not valid; use any number of values, each left or right$",
        ),
        (TOML + "[learner.loss]\nclip_low = -1.0\n", r"run\.toml: learner\.loss\.clip_low = -1\.0 must not be"),
        ('model = "m"\n[learner]\nsteps = 1\n', "missing required field `run_dir`"),
        ('model = "m"\nrun_dir = "r"\n[learner]\nnames = []\n', "missing required field `steps` - at `.*learner`"),
        ("model = \n", "cannot be read as TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_key_value_and_remedy(tmp_path: Path, toml: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path, toml)


OPEN = "--endpoints tcp://127.0.0.1:1 tcp://10.0.0.5:1"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--learner.loss.clip-low -1", r"^learner\.loss\.clip_low = -1\.0 must not be negative"),
        ("--learner.stpes 1", r"unknown flag --learner\.stpes; did you mean --learner\.steps\?"),
        ("--bogus 1", r"unknown flag --bogus; see --help"),
        ("--resum", r"unknown flag --resum; did you mean --resume\?"),
        (OPEN, r"tcp://10\.0\.0\.5:1.*is open to other machines.*`slipstream keys keys`.*insecure = true"),
        ("--seed x", r"^--seed x is not valid; use an integer$"),
        ("--seed", r"^--seed has no value; use --seed VALUE with an integer"),
        ("--seed 1 2", r"^--seed got 2 values: 1 2; use one, an integer"),
        ("--model --seed 1", r"^--model has no value; use --model VALUE with a text \(--model=VALUE if"),
        ("stray --seed 1", r"^'stray' belongs to no flag; expected: --key VALUE"),
        ("--learner.loss.kind c", r"^--learner\.loss\.kind c is not valid; use a or b$"),
        ("--learner.cores 1 b", r"cores 1 b is not valid; use any number of values, each an integer or None$"),
        ("--server", r"^--server is no flag of this command; set server in the config file, or see --help"),
        ("--server.port 1", r"^--server\.port is no flag of this command; set server\.port in the config file"),
        (
            "--only_in_file.x 1",
            r"^--only_in_file\.x is no flag of this command; set only_in_file\.x in the config file",
        ),
        ("--insecure maybe", "--insecure maybe is not a boolean; use --insecure true or --insecure false"),
        ("--learner.library.a", r"--learner\.library\.a has no value; expected: .* VALUE"),
        ("--learner.library 1", r"unknown flag --learner\.library"),
        ("--learner.library.a 1 --learner.loss.clip-low -1", r"clip_low = -1\.0 must not be negative"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_remedy(tmp_path: Path, flags: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path, TOML, *flags.split())


OTHER = 'model = "m"\nrun_dir = "r"\n[learner]\nsteps = 1\n{}\n[learner.data]\ntask = "sort"\n[learner.reward]\n'
OTHER += 'functions = ["exact_match"]\n[server]\n{}\n'


@pytest.mark.parametrize(
    ("config_type", "of_learner", "of_server", "expected"),
    [
        (LearnerRun, "", 'max_model_len = "2048"', r"server\.max_model_len = '2048': Expected `int"),
        (LearnerRun, "", 'http_port = "x"', r"server\.http_port = 'x': Expected `int`"),
        (LearnerRun, "", "cpu_cores = 5", r"server\.cpu_cores = 5: Expected `array"),
        (ServerRun, 'cpu_cores = "0-3"', "", r"learner\.cpu_cores = '0-3': Expected `array"),
    ],
)
def test_a_key_that_is_read_from_the_section_of_another_process_is_checked(
    tmp_path: Path, config_type: type[Any], of_learner: str, of_server: str, expected: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(OTHER.format(of_learner, of_server))
    with pytest.raises(ConfigError, match=expected):
        load_config(config_type, [str(path)], "slipstream")
    path.write_text(OTHER.format("cpu_cores = [0]", "cpu_cores = [1]\nmax_model_len = 64"))
    load_config(config_type, [str(path)], "slipstream")


def test_an_open_endpoint_needs_keys_or_a_word_for_going_without(tmp_path: Path) -> None:
    assert load(tmp_path, TOML, *OPEN.split(), "--insecure").insecure
    assert load(tmp_path, TOML, *OPEN.split(), "--keys", "keys").keys == "keys"


def test_what_is_on_or_off_is_a_flag_alone_or_with_a_word(tmp_path: Path) -> None:
    on = "insecure = true\n" + TOML
    assert load(tmp_path, TOML, "--insecure").insecure and load(tmp_path, TOML, "--insecure", "--seed", "7").seed == 7
    assert load(tmp_path, TOML, "--insecure", "true").insecure and load(tmp_path, TOML, "--insecure=True").insecure
    assert not load(tmp_path, on, "--insecure", "false").insecure
    assert not load(tmp_path, on, "--insecure=false").insecure
    for words, expected in ((["true"], True), (["false"], False), (["auto"], "auto")):
        assert load(tmp_path, TOML, "--learner.loss.fused", *words).learner.loss.fused == expected


def test_what_a_library_types_takes_any_name_and_a_flag_of_it_is_read_as_toml(tmp_path: Path) -> None:
    toml = TOML + "[learner.library]\nsize = 1\nkept = 2.5\ndeep.kept = true\ndeep.mode = 1\n"
    flags = ("--learner.library.size=-3", "--learner.library.deep.mode", "2", "--learner.library.on-disk", "true")
    flags += ("--learner.library.names", '["a", "b"]', "--learner.library.word", "a b", "--seed", "7")
    run = load(tmp_path, toml, *flags)
    deep = {"kept": True, "mode": 2}
    assert run.learner.library == {
        "size": -3, "kept": 2.5, "deep": deep, "on_disk": True, "names": ["a", "b"], "word": "a b"
    }  # fmt: skip
    assert run.seed == 7 and load(tmp_path, to_toml(run)) == run
    deepened = load(tmp_path, toml, "--learner.library.deep", "1", "--learner.library.deep.x", "2")
    assert deepened.learner.library["deep"] == {"x": 2}


def test_a_missing_file_and_a_missing_argument_are_named() -> None:
    with pytest.raises(ConfigError, match=r"config file nope\.toml does not exist.*deploy/recipes"):
        load_config(Run, ["nope.toml"], "learner train")
    with pytest.raises(ConfigError, match=r"expected: learner train run\.toml"):
        load_config(Run, ["--seed", "1"], "learner train")


def test_help_prints_every_key_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(Run, ["--help"], "learner train")
    printed = capsys.readouterr().out
    assert "--learner.loss.clip-low" in printed and "Lower clip." in printed and "--endpoint" in printed
