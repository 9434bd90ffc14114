"""The player with a scripted policy and a real environment: prompts and recorded tokens of each turn."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.environments.conversation import TextConversation
from learner.environments.episode import EpisodeGroup, episodes_of
from learner.environments.player import TurnPrompt
from protocol.codec import decode, encode, pack, unpack
from protocol.messages import Completion, Group
from tests.learner.environments.scripted_player import completion, ids, play_group, script_of


def test_an_environment_gets_the_prompt_even_if_the_row_has_another_column_of_this_name() -> None:
    _, prompts = play_group(script_of("a"), factory="ShowsPrompt", prompt="mine", columns={"prompt": "other"})
    assert prompts[0].token_ids.tolist() == [1, 2, *ids("mine")]


def test_each_prompt_has_all_tokens_so_far_and_each_turn_is_recorded_and_packed_unchanged() -> None:
    group, prompts = play_group(script_of("ab", "stop"), columns={"greeting": "hi"})
    first, second = prompts[:2]
    assert first.token_ids.tolist() == [1, 2, *ids("hi")] and (first.salt, first.stays_at) == ("", "")
    assert second.token_ids.tolist() == [1, 2, *ids("hi"), *ids("ab"), *ids("<ab>")]
    assert (second.salt, second.stays_at) == ("salt 0", "server 0")
    assert first.token_ids.dtype == np.int32 and second.max_tokens == 8
    one, other = group.episodes
    (branch,) = one.branches
    assert branch.token_ids.tolist() == ids("hiab<ab>stop<stop>")
    assert branch.versions == [(None, 2), (4, 2), (None, 4), (5, 4), (None, 6)]
    np.testing.assert_array_equal(branch.behavior_logprobs, [0, 0, -1, -2, 0, 0, 0, 0, -1, -2, -3, -4, *[0] * 6])
    assert branch.turns == [(0, 2), (1, 4)]
    assert branch.turn_T.tolist() == [-1, -1, 0, 0, -1, -1, -1, -1, 1, 1, 1, 1, *[-1] * 6]
    assert [(turn.reward, turn.state) for turn in one.turns] == [(None, "hi"), (None, "<ab>")]
    assert branch.prompt_token_ids is None and branch.finish_reason == "stop"
    assert (one.stats.state, one.stats.num_turns, one.reward) == ("finished", 2, 2.0)
    assert (one.stats.num_prompt_tokens, one.stats.num_cached_tokens) == (10, 1)
    assert 0 < one.stats.environment_s < 60
    assert other.branches[0].token_ids.tolist() == branch.token_ids.tolist()
    assert (group.entered_version, group.oldest_version) == (5, 4)
    again = unpack(pack(group), Group | EpisodeGroup)  # type: ignore[arg-type]
    assert isinstance(again, EpisodeGroup) and pack(again) == pack(group)
    assert episodes_of(again)[0].stats.num_turns == 2


def test_turns_and_responses_are_tokenized_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for name in ("begin", "commands_of", "add_results"):
        method = getattr(TextConversation, name)

        def record_and_call(*args: Any, method: Any = method) -> Any:
            names.add(threading.current_thread().name.split("_")[0])
            return method(*args)

        monkeypatch.setattr(TextConversation, name, record_and_call)
    play_group(script_of("ab", "stop"))
    assert names == {"tokenizer"}


@pytest.mark.parametrize(
    ("script", "settings", "state", "reward", "num_turns"),
    [
        (script_of("a", "b", "c"), {"max_turns": 3}, "max_turns", 3.0, 3),
        (lambda prompts: completion("12345678", 4, "length"), {}, "length", 0.0, 1),
        (script_of(*"abcdefgh"), {"max_tokens": 10}, "length", 2.0, 2),
        (lambda prompts: None if prompts.number else completion("a", 4), {}, "aborted", None, 1),
        (script_of("a", "sleep"), {"factory": "Treacherous", "timeout_s": 2.0}, "tool_timeout", None, 2),
        (script_of("a", "exit"), {"factory": "Treacherous"}, "env_error", None, 2),
    ],
)
def test_every_episode_has_an_end_state_and_only_some_states_have_a_reward(
    script: Callable[[TurnPrompt], Completion | None],
    settings: dict[str, Any],
    state: str,
    reward: float | None,
    num_turns: int,
) -> None:
    group, _ = play_group(script, **settings)
    for episode in group.episodes:
        assert (episode.stats.state, episode.reward, episode.stats.num_turns) == (state, reward, num_turns)
        assert (episode.branches[-1].finish_reason == "length") == (state == "length")


def test_rewards_and_states_of_turns_are_recorded_with_the_turns_they_belong_to() -> None:
    group, _ = play_group(script_of("ab", "raise", "stop"), factory="Counting")
    for episode in group.episodes:
        assert [turn.reward for turn in episode.turns] == [2.0, None, 4.0] and episode.reward == 6.5
        assert [turn.state for turn in episode.turns] == ['["a",0]', '["a",1]', '["a",1]']


def test_a_turn_that_the_environment_did_not_see_has_no_reward() -> None:
    def script(asked: TurnPrompt) -> Completion:
        return completion("12345678", 4, "length") if asked.number else completion("ab", 4)

    group, _ = play_group(script, factory="Counting")
    for episode in group.episodes:
        assert [turn.reward for turn in episode.turns] == [2.0, None]
        assert (episode.stats.state, episode.reward) == ("length", 2.5)


def test_a_failing_reward_of_a_turn_ends_its_episode() -> None:
    group, _ = play_group(script_of("ab"), factory="Incomparable")
    assert group.episodes == []


def test_states_without_a_name_are_those_of_equal_texts() -> None:
    """An empty text says nothing of the state, except at the start of an episode."""
    group, _ = play_group(script_of("a", "b" * 8), factory="Echo", max_turns=2, columns={"greeting": "x" * 100})
    first, second = group.episodes[0].turns
    assert first.state is not None and first.state.startswith("sha256:") and second.state == "<a>"
    group, _ = play_group(script_of("a", "b"), factory="Unrated", max_turns=2)
    assert [turn.state for turn in group.episodes[0].turns] == ["", None]


def test_an_episode_of_a_version_without_turns_is_read_as_one_turn() -> None:
    group, _ = play_group(script_of("ab", "stop"))
    header, *arrays = encode(group)
    table = msgspec.msgpack.decode(header)
    for episode in table["episodes"]:
        del episode["turns"], episode["branches"][0]["turns"]
    old = decode([msgspec.msgpack.encode(table), *arrays], EpisodeGroup)
    (branch,) = old.episodes[0].branches
    assert old.episodes[0].turns == [] and set(branch.turn_T[branch.is_sampled_T]) == {0}


def test_turns_that_do_not_cover_the_sampled_tokens_are_rejected() -> None:
    (branch,) = play_group(script_of("ab", "stop"))[0].episodes[0].branches
    with pytest.raises(ValueError, match="turns of 5 tokens; expected the 6 sampled tokens"):
        msgspec.structs.replace(branch, turns=[(0, 2), (1, 3)])


def test_an_episode_past_its_deadline_starts_no_further_turn() -> None:
    settings = {"episode_deadline_s": 1.0, "max_turns": 100, "max_tokens": 10_000}
    group, prompts = play_group(lambda turn: completion("a", 4), factory="Slow", **settings)
    for number, episode in enumerate(group.episodes):
        turns = [turn for turn in prompts if turn.episode == number]
        assert (episode.stats.state, episode.reward, episode.stats.num_turns) == ("deadline", None, len(turns))
        assert 1 <= len(turns) <= 6 and episode.branches[0].num_sampled == len(turns)


def test_the_last_turn_gets_the_remaining_tokens() -> None:
    _, prompts = play_group(script_of(*"abcdefgh"), max_tokens=13)
    # the prompt has 2 tokens; each turn adds 1 of the policy and 3 of the environment
    assert [(len(turn.token_ids), turn.max_tokens) for turn in prompts if turn.episode == 0] == [
        (2, 8),
        (6, 7),
        (10, 3),
    ]


@pytest.mark.parametrize(("texts", "state"), [(("ab", "stop"), "finished"), (("ab", "cd"), "length")])
def test_the_last_reply_is_omitted_if_it_does_not_fit(texts: tuple[str, ...], state: str) -> None:
    group, _ = play_group(script_of(*texts), max_tokens=2 + len("ab<ab>") + len(texts[1]) + 1)
    for episode in group.episodes:
        assert episode.branches[0].token_ids.tolist() == ids("ab<ab>" + texts[1])
        assert (episode.stats.state, episode.reward) == (state, 2.0)


def test_an_error_of_the_environment_is_counted_and_the_episode_continues() -> None:
    group, prompts = play_group(script_of("raise", "stop"), factory="Treacherous")
    assert prompts[1].token_ids.tolist() == [1, 2, *ids("raise"), *ids("'no such word'")]
    assert [episode.stats.num_failed_calls for episode in group.episodes] == [1, 1]


def test_an_episode_without_sampled_tokens_is_omitted() -> None:
    group, prompts = play_group(script_of("a"), factory="Treacherous", prompt="raise")
    assert group.episodes == [] and prompts == []


def test_an_episode_that_is_over_before_its_first_turn_is_omitted_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group, prompts = play_group(script_of("a"), factory="NeverSetsDone")
    assert group.episodes == [] and prompts == []
    assert caplog.text.count("an episode of prompt 0 was over before its first turn: `done` is true after reset") == 2
