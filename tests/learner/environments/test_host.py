"""One instance of an environment: its answers to the learner's commands, and the accepted classes."""

import os
import random
import re
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.environments.builtin import HIGHER, LOWER, NO_DIGIT, RIGHT, Calculator
from learner.environments.contract import BUILT_IN, load_environment
from learner.environments.host import (
    ANSWER,
    Answer,
    Call,
    ClassError,
    Command,
    Host,
    Observe,
    Rate,
    Reset,
    RewardResult,
    StepResult,
    Turn,
    TurnFeedback,
)
from learner.sandbox.user_code import NotLoaded
from tests.learner.environments.scripted_conversation import described
from tests.learner.environments.scripted_player import USER

EXAMPLES = Path(__file__).parent / "trl_examples.py"
PAGE = Path(__file__).parents[3] / "docs/credit.md"


def answers(name: str, *commands: Command) -> list[Answer]:
    host = Host(load_environment(name if name in BUILT_IN else f"{USER}:{name}", takes_text=True), {})
    with host._loop:
        return [host.answer(command) for command in commands]


EXCHANGES: dict[str, tuple[str, list[tuple[Command, Answer]]]] = {
    "one episode after another": (
        "Echo",
        [
            (Reset({"prompt": "p", "greeting": "hello"}), StepResult("hello")),
            (Turn("a"), StepResult("<a>")), (Turn("stop"), StepResult("<stop>", is_done=True)),
            (Rate(), RewardResult(2.0)),
            (Reset({}), StepResult("")), (Rate(), RewardResult(0.0)),
        ],
    ),
    "one event loop for all async methods, and a numpy reward": (
        "Asynchronous",
        [
            (Reset({}), StepResult("begun")), (Turn("a"), StepResult("a in the same loop")),
            (Turn("cancel"), StepResult("CancelledError", has_failed=True)),
            (Turn("b"), StepResult("b in the same loop")), (Rate(), RewardResult(0.5)),
        ],
    ),
    "the policy reads an error of the method": (
        "Treacherous",
        [
            (Reset({}), StepResult("")), (Turn("raise"), StepResult("'no such word'", has_failed=True)),
            (Turn("again"), StepResult("<again>")),
        ],
    ),
    "no reward": (
        "Unrated", [(Reset({}), StepResult("")), (Turn("a"), StepResult("")), (Rate(), RewardResult(None))],
    ),
    "rewards of turns are part of the reward, and start at zero in the next episode": (
        "Counting",
        [
            (Reset({}), StepResult("", has_feedback=True)), (Observe(after_turn=False), TurnFeedback(None, '["a",0]')),
            (Turn("ab"), StepResult("<ab>")), (Observe(after_turn=True), TurnFeedback(2.0, '["a",1]')),
            (Turn("raise"), StepResult("no", has_failed=True)), (Observe(after_turn=True), TurnFeedback(None, '["a",1]')),
            (Turn("stop"), StepResult("<stop>", is_done=True)), (Observe(after_turn=True), TurnFeedback(4.0, '["a",2]')),
            (Rate(), RewardResult(6.5)),
            (Reset({}), StepResult("", has_feedback=True)), (Rate(), RewardResult(0.5)),
        ],
    ),
    "rewards of turns alone": (
        "OnlyTurns",
        [
            (Reset({}), StepResult("", has_feedback=True)), (Rate(), RewardResult(None)),
            (Turn("ab"), StepResult("")), (Observe(after_turn=True), TurnFeedback(0.5)), (Rate(), RewardResult(0.5)),
        ],
    ),
    "an episode that get_reward leaves unrated stays unrated": (
        "Withdrawn",
        [
            (Reset({}), StepResult("", has_feedback=True)), (Turn("ab"), StepResult("")),
            (Observe(after_turn=True), TurnFeedback(0.5)), (Rate(), RewardResult(None)),
        ],
    ),
    "the secret is guessed": (
        "guess",
        [
            (Reset({"prompt": "=", "secret": 4}), StepResult("")), (Turn("7"), StepResult(LOWER)),
            (Turn("1"), StepResult(HIGHER)), (Turn(" >"), StepResult(NO_DIGIT)), (Turn(""), StepResult(NO_DIGIT)),
            (Turn("=3"), StepResult(HIGHER)), (Rate(), RewardResult(0.0)),
            (Turn("4"), StepResult(RIGHT, is_done=True)), (Rate(), RewardResult(1.0)),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "exchange"), EXCHANGES.values(), ids=list(EXCHANGES))
def test_commands_are_answered(name: str, exchange: list[tuple[Command, Answer]]) -> None:
    assert answers(name, *(command for command, _ in exchange)) == [answer for _, answer in exchange]


def test_any_text_of_a_class_or_tool_can_be_sent_to_the_policy() -> None:
    class Direction(str, Enum):  # noqa: UP042  str() of a StrEnum is its text, so it would show nothing
        NORTH = "north"

    name = os.fsdecode(b"caf\xe9")  # a file name that is not UTF-8

    def find(kind: str) -> Any:
        if kind == "raise":
            raise FileNotFoundError(name)
        return {"numpy": np.str_("north"), "enum": Direction.NORTH}.get(kind, name)

    class Folder:
        def reset(self, **row: Any) -> str:
            return np.str_("north")

        def open(self, text: str) -> str:
            return str(find(text))

    host = Host(Folder, {"find": find})
    with host._loop:
        commands = [
            Reset({}),
            Turn("caf"),
            Turn("raise"),
            *(Call("find", {"kind": k}) for k in ("numpy", "enum", "caf", "raise")),
        ]
        sent = [ANSWER.decode(msgspec.msgpack.encode(host.answer(command))) for command in commands]
    assert [answer.text for answer in sent if isinstance(answer, StepResult)] == [
        "north", "caf?", "caf?", "north", "north", "caf?", r"{'error': 'caf\udce9'}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "command", "problem"),
    [
        ("Treacherous", Reset({"prompt": "raise"}), r"raised ValueError: 'no such row' \(.*user_environments.py:\d+\)"),
        ("Treacherous", Turn("number"), "tell returned 7, expected a text or None"),
        ("Overrated", Rate(), "get_reward returned 'much', expected a finite number or None"),
        ("Incomparable", Observe(after_turn=True), "get_turn_reward returned nan, expected a finite number or None"),
        ("Incomparable", Observe(after_turn=False), "get_state_key returned <object object at .*>, expected a text, a "
            "number, or a tuple or list of them"),
    ],
    ids=str,
)  # fmt: skip
def test_an_error_of_the_class_is_named(name: str, command: Command, problem: str) -> None:
    answer = answers(name, Reset({}), command)[1]
    assert isinstance(answer, ClassError) and re.fullmatch(problem, answer.problem)


@pytest.mark.parametrize(
    ("turns", "replies", "reward"),
    [
        (("37+45=", "82"), ["82>", ""], 1.0),
        (("45+37=", "82"), ["82>", ""], (2 / 6 + 1) / 2),
        (("37+45=", "83"), ["82>", ""], 0.75),
        (("37+45=", "37+45="), ["82>", "82>"], 0.5),
        (("37+=", ""), [" ", ""], 3 / 6 / 2),
        (("37+45+1=", "82"), [" ", ""], (5 / 8 + 1) / 2),
    ],
)
def test_the_calculator_rewards_the_call_and_the_answer_with_half_each(
    turns: tuple[str, ...], replies: list[str], reward: float
) -> None:
    calculator = Calculator()
    calculator.reset(call="37+45=", answer="82", prompt="37,45>")
    assert [calculator.press(turn) for turn in turns] == replies
    assert calculator.done == (not turns[-1].endswith("="))
    assert calculator.get_reward() == pytest.approx(reward)


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_turns_of_a_built_in_environment_divide_its_reward(name: str) -> None:
    """Played at random, the variant by turn answers and rewards an episode like the environment itself."""
    draw = random.Random(name)
    rows = {"guess": {"secret": 4}, "calculator": {"call": "37+45=", "answer": "82"}}
    words = {"guess": ["0", "3", "4", "7", "", "=2"], "calculator": ["37+45=", "45+37=", "82", "8", "3="]}
    seen = set()
    for _ in range(100):
        plain, by_turn = BUILT_IN[name](), BUILT_IN[f"{name}_by_turn"]()
        total = 0.0
        for one in (plain, by_turn):
            one.reset(**rows[name])
        assert by_turn.get_state_key() in ("", (0, 9))
        for _ in range(draw.randint(1, 4)):
            word = draw.choice(words[name])
            replies = [(one.guess if name == "guess" else one.press)(word) for one in (plain, by_turn)]
            assert replies[0] == replies[1]
            reward = by_turn.get_turn_reward()
            total += reward
            seen.add((word, reward > 0))
            if plain.done:
                break
        assert by_turn.done == plain.done and total + by_turn.get_reward() == pytest.approx(plain.get_reward())
    assert {("4", True), ("7", True), ("", False)} <= seen or {("82", True), ("37+45=", True), ("3=", False)} <= seen


def test_the_environment_of_the_docs_page_rewards_its_turns(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(# the module lock\n.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "lock.py").write_text(example)
    host = Host(load_environment(f"{tmp_path / 'lock.py'}:Lock", takes_text=True), {})
    commands: list[Command] = [Reset({"prompt": "p", "code": "42"})]
    for text in "472":
        commands += [Turn(text), Observe(after_turn=True)]
    with host._loop:
        found = [host.answer(command) for command in [*commands, Rate()]]
    assert found[1::2] == [StepResult("="), StepResult(","), StepResult("=", is_done=True), RewardResult(0.95)]
    assert found[2::2] == [TurnFeedback(0.5, "1"), TurnFeedback(-0.05, "1"), TurnFeedback(0.5, "2")]


def test_a_hint_rules_digits_out_and_names_the_state() -> None:
    environment = BUILT_IN["guess_by_turn"]()
    environment.reset(secret=4)
    rewards, states = [], []
    for word in ("6", "7", "", "2", "4"):
        environment.guess(word)
        rewards.append(environment.get_turn_reward())
        states.append(environment.get_state_key())
    assert states == [(0, 5), (0, 5), (0, 5), (3, 5), (3, 5)]
    assert rewards == pytest.approx([0.4, 0.0, 0.0, 0.3, 0.3]) and environment.get_reward() == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("gues", f"it is not built in; known are: {', '.join(BUILT_IN)}"),
        (f"{USER}:not_a_class", "expected a class"),
        (
            f"{USER}:TwoMethods",
            r"has 2 public methods besides reset, get_reward, get_turn_reward and get_state_key \(tell, whisper\); expected one",
        ),
        (f"{USER}:WithoutReset", "no method reset"),
        (f"{USER}:DoneAsMethod", "done is a method of the class, .*; make it an attribute or a property"),
    ],
)
def test_an_unusable_class_is_rejected_with_a_remedy(factory: str, problem: str) -> None:
    with pytest.raises(NotLoaded, match=problem):
        load_environment(factory, takes_text=True)


@pytest.mark.parametrize(
    ("factory", "functions", "problem"),
    [
        ("WithoutDocstring", [], r"the tool tell cannot be described .* docstring in Google style"),
        (None, [f"{EXAMPLES}:multiply"] * 2, "second tool with the name multiply"),
        (None, [f"{USER}:Echo"], "expected a function"),
        ("Calculator", [f"{USER}:add"], "add is both a tool and a method"),
    ],
)
def test_unusable_tools_are_rejected_with_a_remedy(factory: str | None, functions: list[str], problem: str) -> None:
    with pytest.raises((NotLoaded, AssertionError), match=problem):
        described(factory and f"{USER}:{factory}", *functions)
