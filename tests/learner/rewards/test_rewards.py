"""Reward functions in their workers: called as in TRL, checked, killed when late, and never silently zero.

The lifetime of processes with user code is tested in tests/learner/sandbox.
"""

import asyncio
import multiprocessing
import os
import signal
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.config import RewardConfig
from learner.prompts.reasoning import texts_of
from learner.rewards.builtin.mathematics import math_equivalence
from learner.rewards.builtin.text import exact_match, last_number, share_right, think_format
from learner.rewards.call import Log, RewardAnswer, RewardCall, UnreachableService, _arguments, call_function
from learner.rewards.function import load_function
from learner.rewards.workers import FunctionRewards, GroupRewards, RewardWorkers, _total
from protocol.errors import RewardError
from tests.learner.environments.template_families import chat_of
from tests.learner.rewards.scored_groups import DEADLINE_S, STATE, prompt, score
from tests.waiting import until

USER = "tests.learner.rewards.user_rewards"
ASYNCHRONOUS = "tests.learner.rewards.async_rewards"


def test_functions_of_the_course_page_run_unchanged():
    completions = ["two and two make <answer>4</answer>", "<answer>5</answer>", "exactly twenty chars"]
    names = [f"{USER}:{name}" for name in ("reward_len", "problem_reward", "loads_torch")]
    result = score(names, completions, prompt("2+2=", answers="4"))
    assert result.by_function == {
        "reward_len": [-15.0, -2.0, 0.0], "problem_reward": [1.0, 0.0, 0.0], "loads_torch": [0.0, 0.0, 0.0]
    }  # fmt: skip
    assert result.rewards == [-14.0, -2.0, 0.0]


def test_a_conversation_is_passed_as_in_trl():
    conversation = prompt([{"role": "user", "content": "2+2"}], answer="4", level=1)
    result = score([f"{USER}:sees_what_trl_passes", f"{USER}:asynchronous"], ["4", "5"], conversation)
    assert result.rewards == [2.0, 1.0]


def test_a_function_that_changes_the_row_of_a_completion_leaves_that_of_the_others_as_in_trl():
    conversation = prompt([{"role": "user", "content": "2+2"}], hints={"texts": ["sum", "even"]})
    assert score([f"{USER}:changes_its_row"], ["4", "5", "6"], conversation).rewards == [4.0, 4.0, 4.0]


def test_an_answer_started_in_the_prompt_is_scored_as_a_whole():
    prefilled = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    seen = _arguments(RewardCall("exact_match", prefilled, {}, ["2"], [[1]], STATE, prefill="4"), Log(1, frozenset()))
    assert seen["prompts"] == [prefilled[:1]] and seen["completions"] == [[{"role": "assistant", "content": "42"}]]
    started = msgspec.structs.replace(prompt(prefilled, answer="42"), prefill="4")
    assert score(["exact_match"], ["2", "42"], started).rewards == [1.0, 0.0]


def test_functions_can_get_whether_the_prompt_starts_the_reasoning():
    opened = msgspec.structs.replace(prompt("21>", answer="12"), opens_reasoning=True)
    assert score(["exact_match"], ["12", "21</think>12"], opened).rewards == [0.0, 1.0]


@pytest.mark.parametrize(
    ("config", "functions", "rewards"),
    [
        ({"weights": (0.5, 3.0)}, [[2.0, None, None], [1.0, 1.0, 0.0]], [4.0, None, None]),
        ({"weights": (0.5, 3.0), "on_none": "skip"}, [[2.0, None, None], [1.0, 1.0, 0.0]], [4.0, 3.0, 0.0]),
        ({"weights": (1.0, 0.0)}, [[2.0, None], [1.0, 1.0]], [2.0, None]),
        ({"weights": (1.0, 0.1)}, ["timed_out", [0.0, 1.0]], [None, None]),
        ({"weights": (1.0, 0.1), "on_none": "skip"}, ["failed", [0.0, 1.0]], [None, None]),
        ({"weights": (0.0, 1.0)}, ["failed", [1.0, 0.0]], [1.0, 0.0]),
    ],
    ids=str,
)
def test_rewards_are_weighted_and_a_failed_function_drops_the_group(
    config: dict[str, Any], functions: list[Any], rewards: list[float | None]
) -> None:
    of_functions = [
        FunctionRewards(name="f", rewards=[None] * len(rewards), outcome=one)  # type: ignore[arg-type]
        if isinstance(one, str)
        else FunctionRewards(name="f", rewards=one)
        for one in functions
    ]
    settings = RewardConfig(functions=("m:f", "m:g"), **config)
    by_completion = zip(*(one.rewards for one in of_functions), strict=True)
    assert [_total(settings, of_functions, each) for each in by_completion] == rewards
    group = GroupRewards(rewards=rewards, functions=of_functions)
    assert group.is_unscorable == (rewards == [None, None])


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (f"{USER}:raises", "raised ZeroDivisionError: 'division by zero'"),
        (f"{USER}:returns_one", "returned 1 reward, [1.0], expected a list of 3"),
        (f"{USER}:returns_text", "returned ['good', 'good', 'good'] ('good' is not a number)"),
        (f"{USER}:returns_nan", "returned [nan, nan, nan] (nan is not finite)"),
        (f"{USER}:returns_nothing", "returned None"),
        (f"{USER}:returns_huge", "(int too large to convert to float), expected a list of 3"),
        (f"{USER}:returns_matrix", "returned tensor("),
        (f"{USER}:yields_and_raises", "raised KeyError: \"'score'\" ("),
        (f"{USER}:cannot_be_shown", "raised RuntimeError: 'no repr' ("),
        (f"{USER}:exits", "raised SystemExit"),
        (f"{USER}:problem_reward", "raised TypeError: \"problem_reward() missing 1 required positional argument: "
                                   "'answers'"),
        ("passes_tests", "reads the column 'tests', which this row does not have (columns: answer)"),
        (f"{ASYNCHRONOUS}:raises", "raised TimeoutError: 'the judge is asleep'"),
        (f"{ASYNCHRONOUS}:awaits_what_it_cancelled", "raised CancelledError"),
        (f"{ASYNCHRONOUS}:logs_what_is_taken", "reward/mean is the run's own metric"),
        (f"{ASYNCHRONOUS}:logs_too_few", "log_extra('first', …) has 0 values, expected 3"),
    ],
)  # fmt: skip
def test_a_function_that_breaks_its_contract_gets_an_error_with_the_reason(function, problem):
    call = RewardCall(function, "21>", {"answer": "12"}, ["12", "1", "2"], [[1], [2], [3]], STATE)
    answer = call_function(call, frozenset({"mean"}), asyncio.run)
    assert isinstance(answer, str) and problem in answer


def test_the_error_of_a_built_in_function_does_not_ask_to_correct_it():
    (failed,) = score(["json_schema"], ["{}"], prompt(schema="[")).functions
    assert "DecodeError" in failed.message and failed.message.endswith("the first of them '{}'")


def test_values_that_a_function_logs_leave_the_process_as_plain_data():
    logged = {
        "numpy": [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True)],
        "texts": [np.str_("a"), "half a pair: \ud83d", b"b", ""],
        "numbers": [1 << 70, -3, float("inf"), None],
        "a column \ud83d": [[1], [], {}, np.array(2)],
    }
    log = Log(4, frozenset())
    for column, values in logged.items():
        log.columns(column, values)
    log.metric("metric \ud83d", np.float32(0.5))
    answer = RewardAnswer([], log.metrics, log.extra)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=RewardAnswer) == answer
    assert log.metrics == {"metric ?": [0.5]}
    assert log.extra == {
        "numpy": [0.5, 0.5, 3, True],
        "texts": ["a", "half a pair: ?", "b'b'", ""],
        "numbers": [str(1 << 70), -3, float("inf"), None],
        "a column ?": ["[1]", "[]", "{}", 2],
    }


def test_a_generator_is_a_function_with_several_rewards_whose_service_may_be_unreachable():
    call = RewardCall(f"{USER}:yields", "21>", {}, ["12", "1"], [[1], [2]], STATE)
    assert call_function(call, frozenset(), asyncio.run) == RewardAnswer([2.0, 1.0])
    call = msgspec.structs.replace(call, completions=["12", "down"])
    assert isinstance(call_function(call, frozenset(), asyncio.run), UnreachableService)


FATES = {
    "sleep": ("timed_out", "did not return within 3 s and was killed"),
    "hoard": ("failed", "used more than 150 MiB of memory and was killed"),
    "exit": ("failed", "ended its process with exit code 7"),
    "kill": ("failed", "lost its process to signal 9 (Killed)"),
}


def test_a_call_that_ends_its_process_or_never_returns_fails_without_affecting_others():
    config = RewardConfig(functions=(f"{USER}:misbehaves_on_request", "exact_match"), timeout_s=3.0, max_memory_mib=150)
    hows = [how for fate in FATES for how in ("answer", fate)] + ["answer"]
    with RewardWorkers(config) as workers:
        groups = [workers.submit(prompt(answer="12", how=how), ["12", "1"], [[1], [2]], STATE) for how in hows]
        results = [group.result(DEADLINE_S) for group in groups]
    for how, result in zip(hows, results, strict=True):
        broken, fine = result.functions
        outcome, problem = FATES.get(how, ("ok", ""))
        assert (broken.outcome, fine.rewards) == (outcome, [1.0, 0.0])
        assert result.rewards == ([1.0, 0.0] if outcome == "ok" else [None, None])
        if outcome != "ok":
            assert broken.message.startswith(f"reward function misbehaves_on_request {problem}")
            assert "for 2 completions of prompt '21>', the first of them '12'; " in broken.message
    assert "learner.reward.timeout_s" in results[1].functions[0].message


def processes():
    return [child.pid for child in multiprocessing.active_children() if child.name == "reward process" and child.pid]


def test_no_reward_is_lost_when_a_process_is_killed():
    with RewardWorkers(RewardConfig(functions=(f"{USER}:slow_on_request",), num_workers=2)) as workers:
        futures = [workers.submit(prompt(seconds=0.05), ["a"], [[1]], STATE) for _ in range(40)]
        for pid in processes():  # busy
            os.kill(pid, signal.SIGKILL)
        assert [future.result(DEADLINE_S).rewards for future in futures] == [[0.0]] * 40
        for pid in processes():  # idle
            os.kill(pid, signal.SIGKILL)
        assert workers.submit(prompt(seconds=0), ["a"], [[1]], STATE).result(DEADLINE_S).rewards == [0.0]


@pytest.mark.parametrize(("limit", "num_processes"), [(None, 1), (2, 3)])
def test_processes_are_replaced_after_a_number_of_calls(limit, num_processes):
    with RewardWorkers(RewardConfig(functions=(f"{USER}:its_process",), calls_per_worker=limit)) as workers:
        pids = [workers.submit(prompt(), ["a"], [[1]], STATE).result(DEADLINE_S).rewards[0] for _ in range(5)]
    assert len(set(pids)) == num_processes
    assert not processes()


def test_close_fails_waiting_groups():
    functions = (f"{USER}:slow_on_request", f"{ASYNCHRONOUS}:sleeps_on_request")
    workers = RewardWorkers(RewardConfig(functions=functions, timeout_s=1000))
    futures = [workers.submit(prompt(seconds=1000), ["a"], [[1]], STATE) for _ in range(2)]
    workers.close()
    for future in futures:
        with pytest.raises(RewardError, match="closed before the group was scored"):
            future.result(DEADLINE_S)
    with pytest.raises(RewardError, match="closed"):
        workers.submit(prompt(), ["a"], [[1]], STATE)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("exact_mach", "'exact_mach' is not built in; known are: exact_match.* module:function"),
        (f"{USER}:no_such", "holds nothing under the name 'no_such'"),
        (f"{USER}:takes_no_kwargs", r"takes \(completions\) but not prompts, completion_ids.*\*\*kwargs"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_with_its_remedy(spec, problem):
    with pytest.raises(RewardError, match=problem):
        load_function(spec)


def test_functions_that_fail_to_load_are_errors_at_the_start(tmp_path):
    with pytest.raises(RewardError, match="'exact_mach' is not built in"):
        RewardWorkers(RewardConfig(functions=("exact_match", "exact_mach")))
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(RewardError, match=r"a process that imported .* ended its process with exit code 3"):
        RewardWorkers(RewardConfig(functions=(f"{tmp_path}/ends.py:f",)))
    (tmp_path / "large.py").write_text("import time\nx = bytearray(b'x') * (400 << 20)\ntime.sleep(600)\n")
    with pytest.raises(RewardError, match=r"imported.*large\.py:f\) used more than 150 MiB"):
        RewardWorkers(RewardConfig(functions=(f"{tmp_path}/large.py:f",), max_memory_mib=150))


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_service_that_is_down_while_a_replaced_process_imports_costs_time_but_no_group(tmp_path, caplog, kind):
    down, module = tmp_path / "down", tmp_path / "has_client.py"
    module.write_text(
        f"import os, socket\nif os.path.exists({str(down)!r}):\n    socket.create_connection(('127.0.0.1', 9))\n"
        f"{kind} f(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    with RewardWorkers(RewardConfig(functions=(f"{module}:f",), calls_per_worker=1)) as workers:
        assert workers.submit(prompt(), ["a"], [[1]], STATE).result(DEADLINE_S).rewards == [1.0]
        down.touch()
        delayed = workers.submit(prompt(), ["a"], [[1]], STATE)
        until(lambda: "cannot reach its service" in caplog.text)
        down.unlink()
        assert delayed.result(DEADLINE_S).rewards == [1.0]
        module.write_text("1 / 0")
        (failed,) = workers.submit(prompt(), ["a"], [[1]], STATE).result(DEADLINE_S).functions
    assert failed.outcome == "failed" and "cannot be loaded: reward function" in failed.message
    assert "ZeroDivisionError" in failed.message


@pytest.mark.parametrize(
    "wrong",
    [
        {"functions": ("a:f", "a:f")}, {"weights": (1.0, 2.0)}, {"weights": (0.0,)}, {"num_workers": 0},
        {"overlong_buffer_tokens": 2, "overlong_penalty": 0.0},
        {"overlong_buffer_tokens": 2, "overlong_penalty": float("inf")},
    ],
)  # fmt: skip
def test_an_impossible_config_names_its_key(wrong):
    with pytest.raises(ValueError, match=f"{list(wrong)[-1]} = "):
        RewardConfig(**{"functions": ("a:f",)} | wrong)


def test_names_include_the_module_only_for_duplicates():
    config = RewardConfig(functions=("a:f", "b:f", "a:g", "exact_match"))
    assert config.names == ("a:f", "b:f", "g", "exact_match")


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


def test_only_messages_of_the_assistant_are_scored():
    final = [*TOOL_SAYS, {"role": "assistant", "content": "7", "reasoning_content": "it says 7"}]
    for function in (exact_match, last_number, math_equivalence, share_right):
        assert function(completions=[TOOL_SAYS, final, final[:1], []], answer=[7] * 4) == [
            0.0,
            1.0,
            0.0,
            0.0,
        ]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "so "}, {"type": "text", "text": "7"}]}]
    assert last_number(completions=[parts], answer=[7]) == [1.0]
    thinks = [{"role": "assistant", "content": "<answer>7</answer>", "reasoning_content": "well"}]
    assert think_format(completions=[thinks]) == [1.0]


def test_an_answer_in_unfinished_reasoning_does_not_count():
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
def test_a_gold_can_have_any_json_type(gold, right, wrong):
    for function in (exact_match, math_equivalence):
        assert function(completions=[right, wrong], answer=[gold, gold]) == [1.0, 0.0], function
    assert share_right(completions=[right], answer=[gold]) == [1.0]


def test_an_answer_that_is_too_slow_to_score_affects_only_its_completion(caplog):
    completions = ["\\boxed{5}", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{6}", "\\boxed{10/2}"]
    rewards = score(["math_equivalence"], completions, prompt(answer="5"), timeout_s=4.0)
    assert rewards.rewards == [1.0, 0.0, 0.0, 1.0] and rewards.functions[0].outcome == "ok"
    assert "rated its 4 completions one by one, of which 1 timed out again and have a reward of 0" in caplog.text


@pytest.mark.parametrize("gold", [None, "", [], [None]])
def test_without_a_gold_nothing_can_be_scored(gold):
    for function in (exact_match, last_number, math_equivalence, share_right):
        assert function(completions=["None", ""], answer=[gold, gold]) == [None, None], function


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("19", 19, 1.0), ("7 + 12 = 19.", "19", 1.0), ("19 is not 18", 19, 0.0), ("It is -3, not 5-3: -3", -3, 1.0),
        ("5-3", 3, 1.0), ("1,018", "She sells 9 eggs.\n#### 1018", 1.0), ("the 1,2,3", 3, 1.0), ("0.50", 0.5, 1.0),
        ("9" * 5000, 9, 0.0), ("none", 1, 0.0), ([{"role": "assistant", "content": "it is 4"}], 4, 1.0),
        ("4", "four", None),
        ("\N{MINUS SIGN}5", 5, 0.0), ("\N{MINUS SIGN}5", -5, 1.0), ("-5", "\N{MINUS SIGN}5", 1.0), ("-$5", 5, 0.0),
        ("$-5", -5, 1.0),
        ("- 5", 5, 0.0), ("It is - 5", -5, 1.0), ("7 - 5", 5, 1.0), (".5", 5, 0.0), (".5", 0.5, 1.0), ("5", 1e-05, 0.0),
        ("1e-5", 1e-05, 1.0), ("16", 1e16, 0.0), ("1e3", 1000, 1.0), ("2", "1/2", None), ("12", "3e12", 0.0),
        ("3e12", "3e12", 1.0),
        ("100,200", 200, 0.0), ("100,200", "100,200", 1.0), ("12", "1,2", None), ("1e99999", 1, 0.0),
        ("nan", float("nan"), None), (r"\boxed{1{,}234}", 1234, 1.0), (r"$1,\!234{,}567$", 1234567, 1.0),
        ("1{,}234", 234, 0.0), ("1234", "1{,}234", 1.0), ("{1{,}2}", 2, 1.0), ("{1{,}2}", 12, 0.0),
    ],
)  # fmt: skip
def test_last_number_scores_the_last_number_of_the_completion(completion, answer, reward):
    assert last_number(completions=[completion], answer=[answer]) == [reward]


def test_math_equivalence_compares_values_and_knows_gsm8ks_answers():
    gold = "She sells 16 - 3 - 4 = 9 eggs.\n#### 1,018"
    completions = ["so it is \\boxed{1018}", "#### 1018", "The answer is 1,018.", "1017", "no idea"]
    assert math_equivalence(completions=completions, answer=[gold] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert math_equivalence(completions=["$\\frac{1}{2}$"], answer=["0.5"]) == [1.0]


@pytest.mark.parametrize(
    ("final", "text", "number"),
    [
        ("<|channel|>analysis<|message|>6 or 7<|end|><|start|>assistant<|channel|>final<|message|>It is 7<|return|>",
            "<think>6 or 7</think>It is 7", 1.0),
        ("<|channel|>final<|message|>7<|return|>", "7", 1.0),
        ("<|channel|>analysis<|message|>It is 7", "<think>It is 7", 0.0),
        ("<|channel|>analysis<|message|>It is 7<|return|>", "<think>It is 7</think>", 0.0),
        ('<|channel|>analysis<|message|>7<|end|><|start|>assistant to=functions.add<|channel|>commentary '
         '<|constrain|>json<|message|>{"number": 7}<|call|>',
         '<think>7</think><think>{"number": 7}</think>', 0.0),
        ("It is 7", "It is 7", 1.0),
    ],
)  # fmt: skip
def test_the_final_channel_is_the_answer_and_other_channels_are_reasoning(final: str, text: str, number: float) -> None:
    template = chat_of("gpt-oss", [])
    token_ids = template.tokenizer.encode(final, add_special_tokens=False)
    assert texts_of(template.tokenizer, [token_ids]) == [text]
    assert last_number([text, template.spoken(token_ids)], answer=["7", "7"]) == [number, number]
    assert texts_of(template.tokenizer, [token_ids], skip_special_tokens=False) == [final]
