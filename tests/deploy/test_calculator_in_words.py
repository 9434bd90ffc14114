"""The agent of the recipe smollm2_calculator with a scripted policy: the two halves of its reward."""

import pytest

from learner.prompts.tasks import make_rows
from tests.deploy.commands import AGENTS
from tests.learner.environments.scripted_conversation import script_of
from tests.learner.gateway.scripted_gateway import play_with_agent

PRODUCT = make_rows("products", 1, seed=0)[0]
A, B = (int(word) for word in PRODUCT["prompt"][-1]["content"].replace("?", "").split()[2:5:2])


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ((f"CALC({A}*{B})", f"{A * B}"), 1.0),
        ((f"I ask: CALC({A} * {B})", f" {A * B}."), 1.0),
        ((f"CALC({A}*{B})", "I am done"), 0.5),
        ((f"CALC({A}*{B + 1})", f"{A * B}"), 0.5),
        ((f"CALC({A}*{B + 1})", f"{A * B + A}"), 0.0),
        ((f"{A * B}",), 0.0),
        (("CALC(9999999*9999999)",), 0.0),
    ],
)
def test_the_call_and_the_answer_after_it_are_half_a_point_each(turns: tuple[str, ...], reward: float) -> None:
    group = play_with_agent(
        {"answer": PRODUCT["answer"], "prompt": PRODUCT["prompt"]}, PRODUCT["prompt"], script_of(*turns),
        agent=f"{AGENTS / 'calculator_in_words.py'}:run",
    )  # fmt: skip
    for episode in group.episodes:
        assert (episode.stats.state, episode.reward, episode.stats.num_turns) == ("finished", reward, len(turns))
    if len(turns) == 2:
        result = group.episodes[0].messages[1]
        assert result["role"] == "user" and result["content"].isdecimal()
