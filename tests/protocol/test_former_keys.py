"""Former names of keys, values and metrics: read as those of today, with one warning."""

import logging
import math
from pathlib import Path
from typing import Any, cast

import pytest

from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol import former_keys
from protocol.config import WARNED, load_config
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


def nested(key: str, value: object) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return cast(dict[str, Any], value)


def test_every_former_name_leads_to_a_key_or_a_section_with_its_value() -> None:
    keys = {*keys_of(LearnerRun), *keys_of(ServerRun)}
    for former, name in former_keys.KEYS.items():
        assert name in keys or any(key.startswith(f"{name}.") for key in keys), name
        assert former not in keys and not any(key.startswith(f"{former}.") for key in keys), former
        assert former_keys.renamed(nested(former, 7)) == (nested(name, 7), {former: name})
        flag, flag_now = (f"--{key.replace('_', '-')}" for key in (former, name))
        assert former_keys.renamed_flags([flag]) == ([flag_now], {former: name})
        assert former_keys.renamed_flags([flag, "7"]) == ([flag_now, "7"], {former: name})
        assert former_keys.renamed_flags([f"{flag}=7", "-x"]) == ([f"{flag_now}=7", "-x"], {former: name})


def test_every_former_value_leads_to_a_value_of_its_key() -> None:
    for key, values in former_keys.VALUES.items():
        choices = keys_of(LearnerRun)[key].type
        for former, value in values.items():
            assert repr(value) in str(choices) and repr(former) not in str(choices)
            warning = {f'{key} = "{former}"': f'"{value}"'}
            assert former_keys.renamed(nested(key, former)) == (nested(key, value), warning)
            assert former_keys.renamed_flags([f"--{key}", former]) == ([f"--{key}", value], warning)
            assert former_keys.renamed_flags([f"--{key}={former}"]) == ([f"--{key}={value}"], warning)


def test_a_switch_is_now_a_choice(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    assert load(path, in_section("deploy", "sharded = true")).learner.sharding == "full"
    assert load(path, in_section("deploy", "sharded = false")).learner.sharding == "none"
    assert load(path, START + REST, "--deploy.sharded", "true").learner.sharding == "full"


def test_former_names_and_values_cost_one_warning_that_names_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = in_section("learner.push", 'overlap = false\nwire = "delta"')
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # as colocate does
            run = load(
                tmp_path / "a.toml", text, "--learner.weight-sync.compression", "dense", "--learner.push.overlap"
            )
    assert run.learner.weight_sync.overlap_with_training and run.learner.weight_sync.compression == "none"
    (line,) = caplog.messages
    assert "learner.push.overlap is now learner.weight_sync.overlap_with_training" in line
    assert "learner.push.wire is now learner.weight_sync.compression" in line
    assert 'learner.weight_sync.compression = "dense" is now "none"' in line


def test_a_nan_is_no_former_value() -> None:
    assert former_keys.renamed({"learner": {"lora": {"alpha": math.nan}}})[1] == {}


def test_names_of_today_cost_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "a.toml", in_section("learner.weight_sync", "max_attempts = 2"), "--seed", "4")
    assert not caplog.messages


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
        "step": 1, "push/seconds": 0.1, "wait/push": 2.0, "wait/server": 3.0, "time/push": 4.0,
        "time/wait_for_batch": 5.0
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
