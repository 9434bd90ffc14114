import logging
import tomllib
from pathlib import Path

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
FORMER = f"""{START}
active_sampling = true
max_replacements = 4
group_deadline_s = 50.0
rank_timeout_s = 70.0
{REST}
max_prompt_tokens = 9
too_long = "drop"
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


def test_former_names_cost_one_warning_that_names_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # as colocate does
            load(tmp_path / "a.toml", in_section("learner.push", "overlap = true"), "--learner.push.wire", "delta")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "learner.push.overlap is now learner.weight_sync.overlap_with_training" in line
    assert "learner.push.wire is now learner.weight_sync.compression" in line


def test_names_of_today_cost_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "a.toml", in_section("learner.weight_sync", "max_attempts = 2"), "--seed", "4")
    assert not caplog.records


@pytest.mark.parametrize(
    "flags",
    [("--learner.push.wire", "dense"), ("--learner.push.wire=dense",), ("--learner.weight-sync.compression", "none")],
)
def test_a_flag_may_have_a_former_name_and_value(tmp_path: Path, flags: tuple[str, ...]) -> None:
    text = in_section("learner.weight_sync", 'compression = "delta"')
    assert load(tmp_path / "a.toml", text, *flags).learner.weight_sync.compression == "none"


def test_a_flag_that_is_on_or_off_may_have_a_former_name(tmp_path: Path) -> None:
    text = in_section("learner.weight_sync", "overlap_with_training = true")
    assert not load(
        tmp_path / "a.toml", text, "--learner.push.overlap", "false"
    ).learner.weight_sync.overlap_with_training
    assert load(tmp_path / "a.toml", START + REST, "--learner.push.overlap").learner.weight_sync.overlap_with_training


def test_the_servers_section_may_have_former_names(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(START + REST + '[server]\nreceive_overlap = true\nkv_on_push = "recompute"\n')
    server = load_config(ServerRun, [str(path), "--server.kv-on-push", "keep"], "inference-server").server
    assert server.overlap_weight_loading and server.kv_cache_on_weight_sync == "keep"


def test_both_names_of_a_key_are_refused(tmp_path: Path) -> None:
    text = in_section("learner.push", "overlap = true") + "[learner.weight_sync]\noverlap_with_training = false\n"
    with pytest.raises(
        ConfigError, match=r"a\.toml: learner\.push\.overlap is the former name of .*; remove learner\.push\.overlap$"
    ):
        load(tmp_path / "a.toml", text)


def test_a_value_where_a_section_belongs_is_refused(tmp_path: Path) -> None:
    text = START + "push = 3\n[learner.weight_sync]\nmax_attempts = 2\n" + REST
    with pytest.raises(ConfigError, match=r"learner\.weight_sync = 3 is not a section; write \[learner\.weight_sync\]"):
        load(tmp_path / "a.toml", text)


def test_an_unknown_key_in_a_section_with_a_former_name_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key learner\.weight_sync\.overlapp"):
        load(tmp_path / "a.toml", in_section("learner.push", "overlapp = true"))


def test_a_config_without_former_names_is_unchanged() -> None:
    raw = tomllib.loads(
        in_section("learner.weight_sync", 'compression = "delta"') + "[deploy]\n[server]\nkeep = [1, 2]\n"
    )
    assert former_keys.renamed(raw) == (raw, {})


def test_metrics_of_old_runs_get_the_names_of_today() -> None:
    former = {
        "step": 1,
        "push/seconds": 0.1,
        "wait/push": 2.0,
        "wait/server": 3.0,
        "time/push": 4.0,
        "time/wait_for_batch": 5.0,
    }
    assert former_keys.current_metrics(former) == {
        "step": 1, "weight_sync/seconds": 0.1, "bottleneck/weight_sync": 2.0, "bottleneck/server": 3.0,
        "time/weight_sync": 4.0, "time/wait_for_batch": 5.0,
    }  # fmt: skip


def test_keys_with_dots_and_empty_sections_are_as_they_were() -> None:
    raw = {"server": {"vllm": {"hf_overrides": {"a.b": 1, "c": {}}}}, "learner": {"weight_sync": {"max_attempts": 2}}}
    assert former_keys.renamed(raw) == (raw, {})
    raw["learner"] |= {"push": {}}
    config, _ = former_keys.renamed(raw)
    assert config["learner"] == {"weight_sync": {"max_attempts": 2}}
    config, _ = former_keys.renamed({"learner": {"checkpoint_every": 5, "checkpoint": {}}})
    assert config == {"learner": {"checkpoint": {"every_steps": 5}}}


def test_a_former_value_of_a_key_costs_a_warning_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "a.toml", in_section("learner.weight_sync", 'compression = "dense"'))
    (line,) = [record.getMessage() for record in caplog.records]
    assert 'learner.weight_sync.compression = "dense" is now "none"' in line
