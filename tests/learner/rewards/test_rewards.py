"""Reward functions in their workers: called as TRL calls them, checked, killed when late, never silently zero."""

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import msgspec
import pytest

from learner.config import RewardConfig
from learner.prompts.prompts import Prompt
from learner.prompts.reasoning import texts_of
from learner.rewards.builtin.mathematics import math_equivalence
from learner.rewards.builtin.text import exact_match, last_number, share_right, think_format
from learner.rewards.call import Log, RewardCall, _arguments
from learner.rewards.workers import GroupRewards, RewardWorkers
from protocol.errors import RewardError
from tests.learner.environments.template_families import chat_of

USER = "tests.learner.rewards.user_rewards"
USER_FILE = Path(__file__).parent / "user_rewards.py"
DEADLINE_S = 30


def prompt(text="21>", **columns):
    return Prompt(prompt_id=0, prompt=text, token_ids=[1, 2], columns=columns)


def score(functions, completions, the_prompt=None, **config):
    with RewardWorkers(RewardConfig(functions=tuple(functions), **config)) as workers:
        ids = [[7 + i] for i in range(len(completions))]
        return workers.submit(the_prompt or prompt(answer="12"), completions, ids).result(DEADLINE_S)


def test_the_four_functions_of_the_course_page_run_unchanged():
    names = ["reward_func", "reward_len", "format_reward", "problem_reward"]
    completions = [
        "<think>two and two make four, surely</think> <answer>4</answer>",
        "<think>hm</think><answer>5</answer>",
        "exactly twenty chars",
    ]
    result = score([f"{USER}:{name}" for name in names], completions, prompt("2+2=", answers="4"))
    assert result.by_function == {
        "reward_func": [63.0, 35.0, 20.0],
        "reward_len": [-43.0, -15.0, 0.0],
        "format_reward": [1.0, 0.5, 0.0],
        "problem_reward": [1.0, 0.0, 0.0],
    }
    assert result.rewards == [22.0, 20.5, 20.0]


def test_a_function_may_be_named_by_its_file():
    assert score([f"{USER_FILE}:reward_len"], ["a" * 19]).rewards == [-1.0]


def test_a_module_in_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_here.py").write_text("def f(completions, **kwargs):\n    return [3 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    assert score(["my_rewards_here:f"], ["a", "b"]).rewards == [3.0, 3.0]


def test_a_conversation_comes_as_trl_passes_it():
    conversation = prompt([{"role": "user", "content": "2+2"}], answer="4", level=1)
    result = score([f"{USER}:sees_what_trl_passes", f"{USER}:asynchronous"], ["4", "5"], conversation)
    assert result.rewards == [2.0, 1.0]


def test_an_answer_that_the_prompt_has_started_is_rated_whole():
    begun = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    assert score(
        ["exact_match"], ["2", "42"], msgspec.structs.replace(prompt(begun, answer="42"), prefill="4")
    ).rewards == [1.0, 0.0]
    seen = _arguments(RewardCall("exact_match", begun, {}, ["2"], [[1]], prefill="4"), Log(1, frozenset()))
    assert seen["prompts"] == [begun[:1]] and seen["completions"] == [[{"role": "assistant", "content": "42"}]]


def test_workers_import_nothing_heavy():
    assert score([f"{USER}:loads_torch"], ["a"]).rewards == [0.0]


@pytest.mark.parametrize(("on_none", "rewards"), [("unscorable", [4.0, None, None]), ("skip", [4.0, 3.0, 0.0])])
def test_rewards_are_weighted_and_none_of_a_function_is_what_the_config_makes_of_it(on_none, rewards):
    result = score([f"{USER}:first_only", "exact_match"], ["12", "12", "13"], weights=(0.5, 3.0), on_none=on_none)
    assert result.rewards == rewards and not result.is_unscorable


@pytest.mark.parametrize("on_none", ["unscorable", "skip"])
def test_a_group_whose_correctness_timed_out_does_not_train_on_its_format(on_none):
    functions = [f"{USER}:sleeps", "think_format"]
    result = score(functions, ["a", "b"], weights=(1.0, 0.1), timeout_s=0.5, on_none=on_none)
    assert [function.outcome for function in result.functions] == ["timed_out", "ok"]
    assert result.rewards == [None, None] and result.is_unscorable


def test_a_function_that_only_watches_may_fail():
    result = score([f"{USER}:raises", "exact_match"], ["12", "1"], weights=(0.0, 1.0))
    assert result.functions[0].outcome == "failed" and result.rewards == [1.0, 0.0]


def test_a_completion_that_no_weighted_function_scored_has_no_reward():
    result = score([f"{USER}:first_only", "exact_match"], ["12", "12"], weights=(1.0, 0.0))
    assert result.rewards == [2.0, None]
    assert result.by_function["exact_match"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "came"),
    [
        ("raises", "raised ZeroDivisionError: 'division by zero'"),
        ("returns_one", "returned 1 reward, [1.0], expected a list of 3"),
        ("returns_text", "returned ['good', 'good', 'good'] ('good' is not a number)"),
        ("returns_nan", "returned [nan, nan, nan] (nan is not finite)"),
        ("returns_nothing", "returned None"),
        ("exits", "raised SystemExit"),
        ("dies", "ended its process with exit code 7"),
        ("is_always_killed", "lost its process to signal 9 (Killed)"),
        ("problem_reward", "raised TypeError: \"problem_reward() missing 1 required positional argument: 'answers'"),
    ],
)
def test_a_function_that_breaks_its_contract_is_failed_and_named(name, came):
    result = score([f"{USER}:{name}", "exact_match"], ["12", "1", "2"])
    broken, fine = result.functions
    assert (broken.outcome, broken.rewards, fine.outcome) == ("failed", [None] * 3, "ok")
    assert result.rewards == [None] * 3 and result.is_unscorable
    assert broken.message is not None and broken.message.startswith(f"reward function {name} {came}")
    for part in ("3 completions of prompt '21>', the first of them '12'", "; "):
        assert part in broken.message


@pytest.mark.parametrize("name", ["spins", "sleeps"])
def test_a_function_that_never_returns_is_killed_in_time(name):
    start = time.monotonic()
    result = score([f"{USER}:{name}"], ["12", "1"], timeout_s=0.5)
    assert time.monotonic() - start < 10
    assert (result.functions[0].outcome, result.rewards, result.is_unscorable) == ("timed_out", [None, None], True)
    assert re.search(
        rf"{name} did not return within 0.5 s .* raise learner.reward.timeout_s", result.functions[0].message
    )


def test_the_workers_go_on_after_a_kill():
    with RewardWorkers(RewardConfig(functions=(f"{USER}:slow_if_told",), timeout_s=0.5)) as workers:
        futures = [workers.submit(prompt(seconds=s), ["a"], [[1]]) for s in (0, 1000, 0, 0)]
        outcomes = [future.result(DEADLINE_S).functions[0].outcome for future in futures]
    assert outcomes == ["ok", "timed_out", "ok", "ok"]


def processes():
    return [child.pid for child in multiprocessing.active_children() if child.name == "reward process" and child.pid]


def test_a_process_that_is_killed_from_outside_costs_nothing():
    with RewardWorkers(RewardConfig(functions=(f"{USER}:slow_if_told",), num_workers=2)) as workers:
        futures = [workers.submit(prompt(seconds=0.05), ["a"], [[1]]) for _ in range(40)]
        for pid in processes():  # busy
            os.kill(pid, signal.SIGKILL)
        assert [future.result(DEADLINE_S).rewards for future in futures] == [[0.0]] * 40
        for pid in processes():  # idle
            os.kill(pid, signal.SIGKILL)
        assert workers.submit(prompt(seconds=0), ["a"], [[1]]).result(DEADLINE_S).rewards == [0.0]


def test_a_function_that_takes_too_much_memory_is_killed_and_says_so_even_if_it_catches_everything():
    with RewardWorkers(RewardConfig(functions=(f"{USER}:takes_mib",), max_memory_mib=150)) as workers:
        futures = [workers.submit(prompt(mib=mib), ["a"], [[1]]) for mib in (10, 10_000, 10)]
        results = [future.result(DEADLINE_S).functions[0] for future in futures]
    assert [result.outcome for result in results] == ["ok", "failed", "ok"]
    assert "takes_mib used more than 150 MiB of memory and was killed" in results[1].message
    assert "learner.reward.max_memory_mib" in results[1].message


def test_a_module_that_takes_too_much_memory_is_an_error_at_the_start(tmp_path):
    (tmp_path / "large.py").write_text("import time\nx = bytearray(b'x') * (10_000 << 20)\ntime.sleep(9)\n")
    with pytest.raises(RewardError, match=r"imported.*large\.py:f\) used more than 150 MiB"):
        RewardWorkers(RewardConfig(functions=(f"{tmp_path}/large.py:f",), max_memory_mib=150))


@pytest.mark.parametrize(("limit", "num_processes"), [(None, 1), (2, 3)])
def test_processes_are_replaced_after_so_many_calls(limit, num_processes):
    with RewardWorkers(RewardConfig(functions=(f"{USER}:its_process",), calls_per_worker=limit)) as workers:
        pids = [workers.submit(prompt(), ["a"], [[1]]).result(DEADLINE_S).rewards[0] for _ in range(5)]
    assert len(set(pids)) == num_processes
    assert not processes()


def test_close_ends_what_is_waiting():
    workers = RewardWorkers(RewardConfig(functions=(f"{USER}:sleeps",), timeout_s=1000))
    futures = [workers.submit(prompt(), ["a"], [[1]]) for _ in range(2)]
    start = time.monotonic()
    workers.close()
    assert time.monotonic() - start < 10
    for future in futures:
        with pytest.raises(RewardError, match="closed"):
            future.result(DEADLINE_S)
    with pytest.raises(RewardError, match="closed"):
        workers.submit(prompt(), ["a"], [[1]])


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("exact_mach", ["'exact_mach' is not built in", "exact_match", "module:function"]),
        ("no_such_module:f", ["no_such_module", "ModuleNotFoundError"]),
        ("no/such/file.py:f", ["no/such/file.py", "FileNotFoundError"]),
        (f"{USER}:no_such", ["holds nothing under the name 'no_such'"]),
        (f"{USER}:not_callable", ["holds a value of type int"]),
        (f"{USER}:takes_no_kwargs", ["takes (completions) but not prompts, completion_ids", "**kwargs"]),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_the_start(spec, parts):
    with pytest.raises(RewardError) as error:
        RewardWorkers(RewardConfig(functions=("exact_match", spec)))
    for part in parts:
        assert part in str(error.value)


def test_a_module_that_ends_the_process_on_import_is_an_error_at_the_start(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(RewardError, match=r"a process that imported .* ended its process with exit code 3"):
        RewardWorkers(RewardConfig(functions=(f"{tmp_path}/ends.py:f",)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"functions": ()},
        {"functions": ("exact_match", "exact_match")},
        {"functions": ("exact_match",), "weights": (1.0, 2.0)},
        {"functions": ("exact_match",), "weights": (0.0,)},
        {"functions": ("exact_match",), "timeout_s": 0.0},
        {"functions": ("exact_match",), "num_workers": 0},
        {"functions": ("exact_match",), "max_memory_mib": 0},
        {"functions": ("exact_match",), "calls_per_worker": 0},
        {"functions": ("exact_match",), "max_failed_share": 1.0},
    ],
)
def test_an_impossible_config_names_its_key(wrong):
    with pytest.raises(ValueError, match=f"{list(wrong)[-1]} = "):
        RewardConfig(**wrong)


def test_names_carry_the_module_only_where_two_are_the_same():
    config = RewardConfig(functions=("a:f", "b:f", "a:g", "exact_match"))
    assert config.names == ("a:f", "b:f", "g", "exact_match")


def test_group_rewards_go_through_json():
    result = score(["exact_match", f"{USER}:returns_one"], ["12", "2"])
    assert msgspec.json.decode(msgspec.json.encode(result), type=GroupRewards) == result


def test_built_in_functions_score_plain_and_conversational_completions():
    answer = ["123"] * 5
    completions = ["123", " 123\n", "124", "1234", [{"role": "assistant", "content": "123"}]]
    assert exact_match(completions=completions, answer=answer) == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert share_right(completions=["123", "", "124", "1234", "3"], answer=answer) == [1.0, 0.0, 3 / 4, 3 / 4, 0.0]
    assert think_format(completions=["<think>a\nb</think>\n<answer>c</answer>", "<answer>c</answer>"]) == [1.0, 0.0]
    assert think_format(completions=["a</think><answer>c</answer>\n"], opens_reasoning=True) == [1.0]
    assert think_format(completions=["a</think><answer>c</answer>\n"]) == [0.0]


TOOL_SAYS = [
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
    {"role": "tool", "content": "7"},
]


def test_only_what_the_assistant_said_is_rated():
    said = [*TOOL_SAYS, {"role": "assistant", "content": "7", "reasoning_content": "it says 7"}]
    for function in (exact_match, last_number, math_equivalence, share_right):
        assert function(completions=[TOOL_SAYS, said, said[:1], []], answer=[7] * 4) == [0.0, 1.0, 0.0, 0.0]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "so "}, {"type": "text", "text": "7"}]}]
    assert last_number(completions=[parts], answer=[7]) == [1.0]
    thinks = [{"role": "assistant", "content": "<answer>7</answer>", "reasoning_content": "well"}]
    assert think_format(completions=[thinks]) == [1.0]


def test_an_answer_within_reasoning_that_does_not_end_is_none():
    for function in (exact_match, last_number, math_equivalence, share_right):
        unfinished, ended = ["<think>7", "<think>8</think>7"]
        assert function(completions=[unfinished, ended], answer=["7", "7"]) == [0.0, 1.0]
        assert function(completions=["7", "8</think>7"], answer=["7", "7"], opens_reasoning=True) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (42, "42", "24"),
        (42.0, "42", "420"),
        (42.0, "42.0", "42.5"),
        (1e-05, "0.00001", "0.0001"),
        (1e22, "1" + "0" * 22, "1" + "0" * 21),
        (["4", 5], "5", "6"),
        (True, "true", "false"),
    ],
)
def test_a_gold_may_be_of_any_json_type(gold, right, wrong):
    for function in (exact_match, math_equivalence):
        assert function(completions=[right, wrong], answer=[gold, gold]) == [1.0, 0.0], function
    assert share_right(completions=[right], answer=[gold]) == [1.0]


def test_an_answer_that_takes_for_ever_to_judge_costs_its_own_completion_alone(caplog):
    completions = ["\\boxed{5}", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{6}", "\\boxed{10/2}"]
    rewards = score(["math_equivalence"], completions, prompt(answer="5"), timeout_s=6.0)
    assert rewards.rewards == [1.0, 0.0, 0.0, 1.0] and rewards.functions[0].outcome == "ok"
    assert "rated its 4 completions one by one, of which 1 timed out again and have a reward of 0" in caplog.text


@pytest.mark.parametrize("gold", [None, "", [], [None]])
def test_without_a_gold_nothing_can_be_scored(gold):
    for function in (exact_match, last_number, math_equivalence, share_right):
        assert function(completions=["None", ""], answer=[gold, gold]) == [None, None], function


@pytest.mark.parametrize(("opens_reasoning", "expected"), [(False, [1.0, 1.0]), (True, [0.0, 1.0])])
def test_functions_that_ask_know_whether_the_prompt_has_opened_the_reasoning(opens_reasoning, expected):
    opened = msgspec.structs.replace(prompt("21>", answer="12"), opens_reasoning=opens_reasoning)
    assert score(["exact_match"], ["12", "21</think>12"], opened).rewards == expected


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("19", 19, 1.0),
        ("7 + 12 = 19.", "19", 1.0),
        ("19 is not 18", 19, 0.0),
        ("It is -3, not 5-3: -3", -3, 1.0),
        ("5-3", 3, 1.0),
        ("1,018", "She sells 9 eggs.\n#### 1018", 1.0),
        ("the 1,2,3", 3, 1.0),
        ("0.50", 0.5, 1.0),
        ("9" * 5000, 9, 0.0),
        ("none", 1, 0.0),
        ([{"role": "assistant", "content": "it is 4"}], 4, 1.0),
        ("4", "four", None),
        ("\N{MINUS SIGN}5", 5, 0.0),
        ("\N{MINUS SIGN}5", -5, 1.0),
        ("-5", "\N{MINUS SIGN}5", 1.0),
        ("-$5", 5, 0.0),
        ("$-5", -5, 1.0),
        ("- 5", 5, 0.0),
        ("It is - 5", -5, 1.0),
        ("7 - 5", 5, 1.0),
        (".5", 5, 0.0),
        (".5", 0.5, 1.0),
        ("5", 1e-05, 0.0),
        ("1e-5", 1e-05, 1.0),
        ("16", 1e16, 0.0),
        ("1e3", 1000, 1.0),
        ("2", "1/2", None),
        ("12", "3e12", 0.0),
        ("3e12", "3e12", 1.0),
        ("100,200", 200, 0.0),
        ("100,200", "100,200", 1.0),
        ("12", "1,2", None),
        ("1e99999", 1, 0.0),
        ("nan", float("nan"), None),
    ],
)
def test_last_number_rates_the_last_number_of_the_completion(completion, answer, reward):
    assert last_number(completions=[completion], answer=[answer]) == [reward]


def test_math_equivalence_compares_values_and_knows_gsm8ks_answers():
    gold = "She sells 16 - 3 - 4 = 9 eggs.\n#### 1,018"
    completions = ["so it is \\boxed{1018}", "#### 1018", "The answer is 1,018.", "1017", "no idea"]
    assert math_equivalence(completions=completions, answer=[gold] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert math_equivalence(completions=["$\\frac{1}{2}$"], answer=["0.5"]) == [1.0]


@pytest.mark.parametrize(
    ("said", "text", "number"),
    [
        ("<|channel|>analysis<|message|>6 or 7<|end|><|start|>assistant<|channel|>final<|message|>It is 7<|return|>", "<think>6 or 7</think>It is 7", 1.0),
        ("<|channel|>final<|message|>7<|return|>", "7", 1.0),
        ("<|channel|>analysis<|message|>It is 7", "<think>It is 7", 0.0),
        ("<|channel|>analysis<|message|>It is 7<|return|>", "<think>It is 7</think>", 0.0),
        ('<|channel|>analysis<|message|>7<|end|><|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"number": 7}<|call|>',
         '<think>7</think><think>{"number": 7}</think>', 0.0),
        ("It is 7", "It is 7", 1.0),
    ],
)  # fmt: skip
def test_of_channels_the_final_one_is_the_answer_and_the_others_are_reasoning(
    said: str, text: str, number: float
) -> None:
    template = chat_of("gpt-oss", [])
    token_ids = template.tokenizer.encode(said, add_special_tokens=False)
    assert texts_of(template.tokenizer, [token_ids]) == [text]
    assert last_number([text, template.spoken(token_ids)], answer=["7", "7"]) == [number, number]
    assert texts_of(template.tokenizer, [token_ids], skip_special_tokens=False) == [said]
