"""Former names of keys, values and metrics: read as those of today, with one warning."""

import logging
from pathlib import Path
from typing import Any

import pytest

from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol import former_keys
from protocol.config import WARNED, load_config, to_toml
from protocol.config_keys import keys_of
from protocol.errors import ConfigError

START = """
model = "tiny:digits"
run_dir = "runs/x"

[learner]
steps = 3
"""
REST = """
[learner.data]
task = "reverse"

[learner.reward]
functions = ["exact_match"]
"""


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WARNED, "")


def load(path: Path, text: str, *flags: str) -> LearnerRun:
    path.write_text(text)
    return load_config(LearnerRun, [str(path), *flags], "learner train")


def in_section(name: str, keys: str) -> str:
    return f"{START}{REST}\n[{name}]\n{keys}\n"


def test_every_former_name_leads_to_a_key_or_a_section() -> None:
    keys = {*keys_of(LearnerRun), *keys_of(ServerRun)}
    for former, name in former_keys.KEYS.items():
        assert name in keys or any(key.startswith(f"{name}.") for key in keys), name
        assert former not in keys and not any(key.startswith(f"{former}.") for key in keys), former


def test_every_former_value_leads_to_a_value_of_its_key() -> None:
    for key, values in former_keys.VALUES.items():
        choices = keys_of(LearnerRun)[key].type
        for former, value in values.items():
            assert repr(value) in str(choices) and repr(former) not in str(choices)


def test_a_file_with_former_names_is_the_same_config(tmp_path: Path) -> None:
    former = in_section("learner.push", 'overlap = true\nwire = "dense"\npatience_s = 2.0\nports = "29500"\n') + (
        '[learner.correction]\nanchor = "proximal"\nweight = "mask"\nlevel = "sequence"\n'
        "[learner.sampling]\nnum_completions = 5\n"
    )
    today = in_section(
        "learner.weight_sync",
        'overlap_with_training = true\ncompression = "none"\nstraggler_timeout_s = 2.0\nports = "29500"\n',
    ) + (
        '[learner.off_policy_correction]\nanchor = "proximal"\nweight = "mask"\ngranularity = "sequence"\n'
        "[learner.sampling]\ngroup_size = 5\n"
    )
    assert to_toml(load(tmp_path / "a.toml", former)) == to_toml(load(tmp_path / "b.toml", today))


@pytest.mark.parametrize(
    ("text", "flags", "warnings"),
    [
        (
            in_section("learner.push", "overlap = true"),
            ("--learner.push.wire", "delta"),
            (
                "learner.push.overlap is now learner.weight_sync.overlap_with_training",
                "learner.push.wire is now learner.weight_sync.compression",
            ),
        ),
        (
            in_section("learner.weight_sync", 'compression = "dense"'),
            (),
            ('learner.weight_sync.compression = "dense" is now "none"',),
        ),
        (in_section("learner.weight_sync", "max_attempts = 2"), ("--seed", "4"), ()),
    ],
    ids=["names", "value", "today's"],
)
def test_former_names_cost_one_warning_that_names_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, flags: tuple[str, ...], warnings: tuple[str, ...]
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # as colocate does
            load(tmp_path / "a.toml", text, *flags)
    assert len(caplog.messages) == bool(warnings)
    assert all(warning in caplog.messages[0] for warning in warnings)


@pytest.mark.parametrize(
    "flags",
    [("--learner.push.wire", "dense"), ("--learner.push.wire=dense",), ("--learner.weight-sync.compression", "none")],
)
def test_a_flag_may_have_a_former_name_and_value(tmp_path: Path, flags: tuple[str, ...]) -> None:
    text = in_section("learner.weight_sync", 'compression = "delta"')
    assert load(tmp_path / "a.toml", text, *flags).learner.weight_sync.compression == "none"


def test_a_flag_that_is_on_or_off_may_have_a_former_name(tmp_path: Path) -> None:
    for value, flags in (("true", ["--learner.push.overlap", "false"]), ("false", ["--learner.push.overlap"])):
        text = in_section("learner.weight_sync", f"overlap_with_training = {value}")
        is_on = load(tmp_path / "a.toml", text, *flags).learner.weight_sync.overlap_with_training
        assert is_on == (value == "false")


def test_the_servers_section_may_have_former_names(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(START + REST + '[server]\nreceive_overlap = true\nkv_on_push = "recompute"\n')
    server = load_config(ServerRun, [str(path), "--server.kv-on-push", "keep"], "inference-server").server
    assert server.overlap_weight_loading and server.kv_cache_on_weight_sync == "keep"


BOTH = in_section("learner.push", "overlap = true") + "[learner.weight_sync]\noverlap_with_training = false\n"
NO_SECTION = START + "push = 3\n[learner.weight_sync]\nmax_attempts = 2\n" + REST


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOTH, r"a\.toml: learner\.push\.overlap is the former name of .*; remove learner\.push\.overlap$"),
        (NO_SECTION, r"learner\.weight_sync = 3 is not a section; write \[learner\.weight_sync\]"),
        (in_section("learner.push", "overlapp = true"), r"unknown key learner\.weight_sync\.overlapp"),
    ],
    ids=["both names", "a value for a section", "unknown key"],
)
def test_what_former_names_lead_to_is_still_checked(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path / "a.toml", text)


def test_metrics_of_old_runs_get_the_names_of_today() -> None:
    former = {
        "step": 1, "push/seconds": 0.1, "wait/push": 2.0, "wait/server": 3.0, "time/push": 4.0, "time/wait_for_batch": 5.0
    }  # fmt: skip
    assert former_keys.current_metrics(former) == {
        "step": 1, "weight_sync/seconds": 0.1, "bottleneck/weight_sync": 2.0, "bottleneck/server": 3.0,
        "time/weight_sync": 4.0, "time/wait_for_batch": 5.0,
    }  # fmt: skip


def test_keys_with_dots_and_empty_sections_are_as_they_were() -> None:
    raw: dict[str, Any] = {
        "deploy": {},
        "server": {"vllm": {"hf_overrides": {"a.b": 1, "c": {}}}, "keep": [1, 2]},
        "learner": {"weight_sync": {"max_attempts": 2}},
    }
    assert former_keys.renamed(raw) == (raw, {})
    raw["learner"] |= {"push": {}}
    config, _ = former_keys.renamed(raw)
    assert config["learner"] == {"weight_sync": {"max_attempts": 2}}
    config, _ = former_keys.renamed({"learner": {"checkpoint_every": 5, "checkpoint": {}}})
    assert config == {"learner": {"checkpoint": {"every_steps": 5}}}
