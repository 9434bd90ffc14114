"""samples.jsonl stays small, and readers read only its ends."""

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import learner.report.records
from learner.environments.episode import EpisodeStats, EpisodeTurn, TokenSequence
from learner.policy.model import load_tokenizer
from learner.report.page import render
from learner.report.records import Samples, episode_of
from learner.report.sample_view import newest_table, table_of_run
from learner.report.summary import steps_in
from learner.rollouts.rollout_group import RolloutGroup
from learner.storage.files import ends_of
from protocol.model_files import resolve_model
from tests.learner.report.synthetic_run import write_run

TOKENIZER = load_tokenizer(resolve_model("tiny:digits"))


def a_group(num_tokens: int = 3) -> RolloutGroup:
    completion = TokenSequence(
        token_ids=np.full(num_tokens, 5, np.int32), behavior_logprobs=np.zeros(num_tokens, np.float32),
        versions=[(0, num_tokens)], finish_reason="stop",
    )  # fmt: skip
    return RolloutGroup(
        group_id="0.0", slot=0, prompt_token_ids=np.array([3, 4], np.int32), completions=[completion] * 6,
        rewards_G=[0.5] * 6, rewards_by_function={}, entered_version=0,
    )  # fmt: skip


def write(path: Path, steps: range, every_steps: int, group: RolloutGroup | None = None) -> list[int]:
    samples = Samples(path, every_steps)
    for step in steps:
        samples.keep(step, group or a_group(), TOKENIZER, dict)
    samples.close()
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("every_steps", "kept"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (10, [1]), (0, [])])
def test_samples_are_written_periodically(tmp_path: Path, every_steps: int, kept: list[int]) -> None:
    assert write(tmp_path / "samples.jsonl", range(1, 6), every_steps) == kept


def test_a_sample_has_the_answer_the_rewards_of_every_function_and_the_number_of_completions(
    tmp_path: Path,
) -> None:
    group = msgspec.structs.replace(a_group(), rewards_by_function={"right": [1.0, None] * 3, "short": [0.5] * 6})
    samples, path = Samples(tmp_path / "samples.jsonl", 1), tmp_path / "samples.jsonl"
    samples.keep(1, group, TOKENIZER, lambda: {"answer": ["42", 42], "level": 3})
    samples.close()
    line = json.loads(path.read_text())
    assert (line["answer"], line["functions"]) == (["42", 42], {"right": [1.0, None, 1.0, None], "short": [0.5] * 4})
    table = newest_table(path)
    (shown,) = table.samples
    assert (shown.answer, len(shown.completions), shown.more) == ("['42', 42]", 4, 2)
    assert table.functions == ["right", "short"]
    assert [[*one.functions.values()] for one in shown.completions[:2]] == [["1.00", "0.50"], ["–", "0.50"]]


def test_a_file_over_its_limit_keeps_the_first_and_the_newest_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner.report.records, "MAX_BYTES", 40_000)
    path = tmp_path / "samples.jsonl"
    kept = write(path, range(1, 501), 1, a_group(100))
    assert path.stat().st_size <= 40_000
    head = next(i for i, step in enumerate(kept) if step != i + 1)
    assert head > 5 and kept[head:] == list(range(kept[head], 501)) and len(kept) - head > 5
    assert "has reached the limit of its size" in table_of_run(path).note
    assert write(path, range(501, 503), 1) == [*kept, 501, 502], "a resume continues"


@pytest.mark.parametrize("first_tokens", [3, 3000])
def test_the_newest_sample_is_kept_even_if_it_is_longer_than_what_a_cut_keeps(
    first_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner.report.records, "MAX_BYTES", 40_000)
    path = tmp_path / "samples.jsonl"
    write(path, range(1, 2), 1, a_group(first_tokens))
    for step in range(2, 10):
        kept = write(path, range(step, step + 1), 1, a_group(3000))
        assert kept[-1] == step and path.stat().st_size <= 40_000
    assert (kept[0] == 1) == (first_tokens == 3)


def test_an_episode_has_the_beginnings_of_long_prompts_of_its_branches() -> None:
    (branch, *_) = a_group().completions
    branches = [
        msgspec.structs.replace(branch, prompt_token_ids=None if num is None else np.full(num, 5, np.int32))
        for num in (None, 2048, 2050)
    ]
    stats = EpisodeStats(state="finished", num_turns=3, num_calls=0, environment_s=0.0)
    first, second, third = (one["prompt"] for one in episode_of(stats, [], branches, TOKENIZER)["branches"])
    assert first is None and third == f"{second} … (2 more tokens)"


@pytest.mark.parametrize("damaged", [b"\0" * 50, b"17"])
def test_a_damaged_first_line_does_not_stop_a_run(
    damaged: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner.report.records, "MAX_BYTES", 10_000)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(damaged + b"\n")
    samples = Samples(path, 1)
    for step in range(1, 101):
        assert samples.keep(step, a_group(100), TOKENIZER, dict) is not None
    samples.close()
    assert path.stat().st_size <= 10_000 and path.read_bytes().startswith(damaged)


def test_a_report_shows_both_ends_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, steps=100)
    assert table_of_run(tmp_path / "samples.jsonl").note == "The first and the last 25 groups of samples.jsonl."
    path = tmp_path / "samples.jsonl"
    whole = steps_in(path.read_bytes().split(b"\n"), path)
    with path.open("a") as file:  # step 99 again, after a resume
        file.write(json.dumps(whole[98] | {"prompt": "again>"}) + "\n")
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 10] = b"not read!!"
    path.write_bytes(content)
    monkeypatch.setattr("learner.report.sample_view.SAMPLED_BYTES", 4000)
    steps = [line["step"] for line in steps_in(ends_of(path, 4000), path)]
    assert steps[:2] == [1, 2] and steps[-2:] == [98, 99]
    page = render(tmp_path)
    assert whole[0]["prompt"] in page and whole[97]["prompt"] in page and "again&gt;" in page
    assert whole[99]["prompt"] not in page, "the resume replaced this sample"
    assert "in between are left out" in page


def sample_lines(steps: Iterable[int], num_bytes: int) -> str:
    return "".join(json.dumps({"step": step, "prompt": "x" * num_bytes}) + "\n" for step in steps)


@pytest.mark.parametrize("num_bytes", [10, 300_000])
def test_the_dashboard_shows_the_newest_samples_of_any_length(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(sample_lines([*range(1, 18), *range(11, 16)], num_bytes) + '{"step": 16, "torn')
    assert [sample.step for sample in newest_table(path).samples] == list(range(15, 5, -1)), "a resume repeated some"
    path.write_text(sample_lines(range(1, 4), num_bytes))
    assert [sample.step for sample in newest_table(path).samples] == [3, 2, 1]
    path.write_text("")
    assert newest_table(path).samples == []


@pytest.mark.parametrize(("num_bytes", "shown"), [(1 << 18, [20, 19]), (1000, [20])], ids=["two", "at least the last"])
def test_the_dashboard_reads_a_bounded_part_of_very_long_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, shown: list[int]
) -> None:
    (tmp_path / "samples.jsonl").write_text(sample_lines(range(1, 21), 100_000))
    monkeypatch.setattr("learner.report.sample_view.NEWEST_BYTES", num_bytes)
    assert [one.step for one in newest_table(tmp_path / "samples.jsonl").samples] == shown


def a_branch(text: str, versions: list[tuple[int | None, int]], prompt: str | None = None) -> TokenSequence:
    token_ids = np.array(TOKENIZER.encode(text, add_special_tokens=False), np.int32)
    assert len(token_ids) == sum(count for _, count in versions)
    return TokenSequence(
        token_ids=token_ids, behavior_logprobs=np.zeros(len(token_ids), np.float32), versions=versions,
        finish_reason="stop",
        prompt_token_ids=None if prompt is None else np.array(TOKENIZER.encode(prompt, add_special_tokens=False),
            np.int32),
    )  # fmt: skip


def test_samples_keep_every_branch_and_the_report_shows_speaker_and_version(
    tmp_path: Path,
) -> None:
    """Two episodes, of which the second has a branch. The policy writes 1 to 3, the environment 8 and 9."""
    branches = [
        a_branch("12893", [(4, 1), (5, 1), (None, 2), (5, 1)]), a_branch("1", [(5, 1)]), a_branch("2", [(7, 1)], "77"),
    ]  # fmt: skip
    stats = [
        EpisodeStats(state="finished", num_turns=2, num_calls=1, num_failed_calls=1, environment_s=0.5),
        EpisodeStats(state="tool_timeout", num_turns=1),
    ]
    group = msgspec.structs.replace(
        a_group(), rewards_G=[1.0, None], completions=branches, num_branches_G=[1, 2], stats_G=stats,
        turns_G=[[EpisodeTurn(reward=0.25), EpisodeTurn()], [EpisodeTurn()]],
    )  # fmt: skip
    write_run(tmp_path)
    (tmp_path / "samples.jsonl").unlink()
    write(tmp_path / "samples.jsonl", range(1, 2), 1, group)
    first, second = json.loads((tmp_path / "samples.jsonl").read_text())["episodes"]
    assert first == {
        "state": "finished", "turns": 2, "calls": 1, "failed_calls": 1, "environment_s": 0.5,
        "turn_rewards": [0.25, None],
        "branches": [{"prompt": None, "runs": [[4, "1"], [5, "2"], [None, "89"], [5, "3"]]}],
    }  # fmt: skip
    assert [branch["prompt"] for branch in second["branches"]] == [None, "77"]
    assert [branch["runs"] for branch in second["branches"]] == [[[5, "1"]], [[7, "2"]]]
    page = render(tmp_path)
    parts = (
        '<span class="v0">1</span><span class="v1">2</span><span class="environment">89</span><span '
        'class="v1">3</span>',
        "finished · 2 turns · 1 tool call · 1 answered with an error · rewards of turns: 0.25, – · 0.5 s in the "
        "environment",
        "tool_timeout · 1 turn · 0.0 s in the environment",
        '<span class="mono">77</span>',
        '<span class="key v0">policy version 4</span><span class="key v1">policy version 5</span>'
        '<span class="key v2">policy version 7</span><span class="key environment">the environment</span>',
    )
    for part in parts:
        assert part in page, part
