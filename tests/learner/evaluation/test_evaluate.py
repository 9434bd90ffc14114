"""`learner evaluate` with a scripted OpenAI server, and the keys of [learner.evaluation]."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.config import DataConfig, EvaluationConfig, LearnerRun
from learner.evaluation import openai_client
from learner.evaluation.eval_sets import evaluated_data, sets_of
from learner.evaluation.evaluate import evaluate, summarize_ratings
from learner.evaluation.openai_client import EvaluationError, PromptAnswers
from learner.evaluation.results import Evaluation, format_evaluation
from learner.rewards.workers import FunctionRewards, GroupRewards
from learner.run_inputs import RunInputs
from protocol.config import load_config, to_toml
from protocol.errors import ConfigError, DataError, RewardError
from tests.learner.in_process import run_here
from tests.learner.openai_server import OpenAIServer
from tests.learner.own_task import write_task
from tests.learner.runs import make_run
from tests.ports import free_port


def a_run(
    tmp_path: Path, openai: OpenAIServer | None, *flags: str, functions: tuple[str, ...] = ("right",)
) -> LearnerRun:
    url = openai.url if openai else f"http://127.0.0.1:{free_port()}/v1"
    arguments = [write_task(tmp_path, functions), "--learner.evaluation.url", url, *flags]
    return load_config(LearnerRun, arguments, "learner evaluate")


def noted(tmp_path: Path) -> list[Evaluation]:
    lines = (tmp_path / "run" / "evaluations.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Evaluation) for line in lines]


def test_every_prompt_is_requested_once_and_scored_as_in_training(tmp_path: Path, openai: OpenAIServer) -> None:
    openai.answer = lambda prompt, count: [prompt[:-1] if prompt[1] in "0123" else "9999"]
    made = evaluate(a_run(tmp_path, openai, functions=("right", "length")))[0]
    assert len(openai.requests) == len({tuple(body["prompt"]) for body in openai.requests}) == 10
    assert {(body["n"], body["temperature"], body["max_tokens"]) for body in openai.requests} == {(1, 0.0, 8)}
    assert made.functions["right"] is not None and made.functions["right"].mean == 0.4
    assert made.functions["length"] is not None and made.functions["length"].mean == pytest.approx(3.2)
    assert made.reward is not None and made.reward.mean == pytest.approx(3.6)
    assert made.reward_finished is not None and made.reward_finished.mean == 3.0
    assert (made.truncated_frac, made.length_mean, made.versions) == (pytest.approx(0.6), pytest.approx(3.2), (3, 4))
    assert noted(tmp_path) == [made] and made.difference is None and made.pass_at == {} and made.majority is None


def test_functions_see_the_steps_of_the_policy_that_has_answered(tmp_path: Path, openai: OpenAIServer) -> None:
    (made,) = evaluate(a_run(tmp_path, openai, functions=("progress",)))
    assert made.reward is not None and made.reward.mean == 3 / 6


def test_an_evaluation_that_cannot_be_recorded_is_still_returned(
    tmp_path: Path, openai: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    run = a_run(tmp_path, openai)
    Path(run.run_dir).mkdir(parents=True)
    file = Path(run.run_dir, "evaluations.jsonl")
    file.write_text("notes of mine\n")
    (made,) = evaluate(run)
    assert made.num_prompts == 10 and "the evaluation could not be recorded: " in caplog.text
    assert file.read_text() == "notes of mine\n"


def test_an_evaluation_is_compared_per_prompt_with_the_previous_comparable_one(
    tmp_path: Path, openai: OpenAIServer
) -> None:
    openai.answer = lambda prompt, count: [prompt[:-1] if prompt[1] in "0123" else "9"]
    evaluate(a_run(tmp_path, openai))
    flags = ("--learner.evaluation.max-tokens", "4", "--learner.reward.overlong-buffer-tokens", "5")
    evaluate(a_run(tmp_path, openai, *flags))
    openai.answer, openai.version = (lambda prompt, count: [prompt[:-1] if prompt[1] in "234567" else "9"]), 7
    made = evaluate(a_run(tmp_path, openai))[0]
    # Correct in both: 2 and 3; lost: 0 and 1; won: 4 to 7.
    assert made.difference is not None and made.difference.mean == pytest.approx(0.2) and made.before == (3, 4)
    assert made.difference.low is not None and made.difference.low < 0 < 0.2
    assert noted(tmp_path)[1].difference is None, "evaluations with other limits are not comparable"
    expected = format_evaluation(made)
    assert "difference to policy versions 3 to 4: 0.2  [-" in expected and "by policy versions 7 to 8" in expected


@pytest.mark.parametrize(
    ("functions", "flags", "is_comparable"),
    [
        (("exact_match",), ("--learner.evaluation.url", "http://elsewhere/v1"), True),
        (("exact_match",), ("--learner.reward.skip-special-tokens", "False"), False),
        (("exact_match",), ("--learner.reward.on-none", "skip"), False),
        (("first.py:score",), ("--learner.reward.functions", "second.py:score"), False),
        (("judge",), ("--learner.reward.judge.url", "http://elsewhere/v1"), True),
        (("judge",), ("--learner.reward.judge.model", "large"), False),
        (("judge",), ("--learner.reward.judge.prompt", "Rate {completion} from 10 to 0."), False),
        (("judge",), ("--learner.reward.judge.max-tokens", "7"), False),
    ],
)
def test_evaluations_that_another_grader_scored_are_not_comparable(
    tmp_path: Path, functions: tuple[str, ...], flags: tuple[str, ...], is_comparable: bool
) -> None:
    judge = ("--learner.reward.judge.url", "http://judge/v1") if "judge" in functions else ()

    def digest_with(*flags: str) -> str:
        run = a_run(tmp_path, None, "--learner.reward.functions", *functions, *judge, *flags)
        return sets_of(RunInputs(run))[0].digest

    assert (digest_with() == digest_with(*flags)) is is_comparable


def test_weights_that_no_run_has_updated_are_named_as_their_model(tmp_path: Path, openai: OpenAIServer) -> None:
    openai.num_untrained = 20
    evaluate(a_run(tmp_path, openai))
    text = format_evaluation(evaluate(a_run(tmp_path, openai))[0])
    assert "by a model, " in text and "difference to the previous evaluation: 0 " in text


def test_pass_at_k_and_the_majority_are_reported_for_several_samples(tmp_path: Path, openai: OpenAIServer) -> None:
    openai.answer = lambda prompt, count: (
        [prompt[:-1]] + ["9"] * (count - 1) if prompt[1] < "5" else [prompt[:-1]] * count
    )
    flags = ["--learner.evaluation.num-samples", "4", "--learner.evaluation.temperature", "1.0"]
    made = evaluate(a_run(tmp_path, openai, *flags))[0]
    shares = {k: share.mean for k, share in made.pass_at["right"].items()}
    assert shares == {"1": pytest.approx(0.625), "2": pytest.approx(0.75), "4": 1.0}
    assert made.majority is not None and made.majority.mean == 0.5
    assert made.reward is not None and made.reward.mean == pytest.approx(0.625)
    seeds = {body["seed"] + sample for body in openai.requests for sample in range(4)}
    assert len(seeds) == 10 * 4, "samples with one seed would share their random numbers"


@pytest.mark.parametrize("start", [{"opens_reasoning": True}, {"prefill": "Well: <think>"}])
def test_reasoning_that_never_ends_does_not_vote_for_the_majority(tmp_path: Path, start: dict[str, Any]) -> None:
    run = a_run(tmp_path, None, "--learner.evaluation.num-samples", "5", "--learner.evaluation.temperature", "1.0")
    (eval_set,) = sets_of(RunInputs(run))
    eval_set.prompts = [msgspec.structs.replace(eval_set.prompts[0], **start)]
    texts, rewards = (
        ["\\boxed{7} or", "a</think>7", "b</think>8", "c</think>8", "d</think>7"],
        [0.0, 1.0, 0.0, 0.0, 1.0],
    )
    answers = PromptAnswers(texts, None, 5, [True] * 5, None)
    rated = GroupRewards(rewards=list(rewards), functions=[FunctionRewards(name="right", rewards=list(rewards))])
    made = summarize_ratings(eval_set, "tiny", [answers], [rated])
    assert made.majority is not None and made.majority.mean == 1.0


def test_the_evaluation_waits_for_an_unavailable_server_and_reports_it_once(
    tmp_path: Path, openai: OpenAIServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_client, "AGAIN_AFTER_S", 0.1)
    openai.failures = [503, 502, 500, 429]
    made = evaluate(a_run(tmp_path, openai, "--learner.evaluation.max-concurrent", "1"))[0]
    assert made.reward is not None and made.reward.mean == 1.0 and len(openai.requests) == 10
    (expected,) = [message for message in caplog.messages if "retrying for" in message]
    assert expected.startswith(f"{openai.url}/models returned status 503: no; retrying for up to ")


@pytest.mark.parametrize("tells_tokens", [True, False])
def test_stops_beyond_the_servers_limit_are_applied_to_its_answers(
    tmp_path: Path, openai: OpenAIServer, tells_tokens: bool
) -> None:
    openai.answer, openai.tells_tokens = (lambda prompt, count: [prompt[:-1] + "=9+"]), tells_tokens
    config = a_run(tmp_path, openai, "--learner.sampling.stop", "a", "b", "c", "d", "+", "=", functions=("length",))
    made = evaluate(config)[0]
    assert {tuple(body["stop"]) for body in openai.requests} == {("a", "b", "c", "d")}
    assert made.reward is not None and made.reward.mean == len("20=") and made.truncated_frac == 0.0
    assert made.length_mean == (len("20=") if tells_tokens else len("20=9+"))
    assert (
        made.versions == ((3, 4) if tells_tokens else None)
        and ("by a model" in format_evaluation(made)) != tells_tokens
    )


@pytest.mark.parametrize("tells_tokens", [True, False])
def test_a_special_token_can_be_a_stop_and_is_removed_from_the_rated_text(
    tmp_path: Path, openai: OpenAIServer, tells_tokens: bool
) -> None:
    openai.answer, openai.tells_tokens = (lambda prompt, count: [prompt[:-1] + "<eos>"]), tells_tokens
    made = evaluate(a_run(tmp_path, openai, "--learner.sampling.stop", "<eos>"))[0]
    assert made.reward is not None and made.reward.mean == 1.0
    assert not any(body["skip_special_tokens"] for body in openai.requests), "the server would never see the stop"
    evaluate(a_run(tmp_path, openai))
    assert all(body["skip_special_tokens"] for body in openai.requests[10:])


@pytest.mark.parametrize("tells_tokens", [True, False])
def test_built_in_functions_and_the_majority_see_no_special_tokens(
    tmp_path: Path, openai: OpenAIServer, tells_tokens: bool
) -> None:
    openai.answer = lambda prompt, count: [prompt[:-1] + "<eos>", prompt[:-1], "9"]
    openai.tells_tokens = tells_tokens
    flags = ["--learner.reward.skip-special-tokens", "false", "--learner.reward.functions", "exact_match"]
    samples = ["--learner.evaluation.num-samples", "3", "--learner.evaluation.temperature", "1.0"]
    (made,) = evaluate(a_run(tmp_path, openai, *flags, *samples))
    assert made.reward is not None and made.reward.mean == pytest.approx(2 / 3)
    assert made.majority is not None and made.majority.mean == 1.0
    openai.answer = lambda prompt, count: [prompt[:-1] + "<eos>"] * count
    (seen,) = evaluate(a_run(tmp_path, openai, *flags[:2], functions=("length",)))
    assert seen.reward is not None and seen.reward.mean == len("20<eos>")


BOTH_KEYS = ("EVALUATION_API_KEY", "OPENAI_API_KEY")


@pytest.mark.parametrize(
    ("status", "variables", "expected"),
    [
        (404, (), r"end learner\.evaluation\.url with the API version"),
        (400, (), r"correct the setting that it names in \[learner"),
        (401, (), "no key was sent. Set EVALUATION_API_KEY or OPENAI_API_KEY to the server's key"),
        (401, BOTH_KEYS[1:], "the key in OPENAI_API_KEY is not the server's. Set OPENAI_API_KEY to"),
        (401, BOTH_KEYS, r"Set EVALUATION_API_KEY to.* from server\.api_key_file or VLLM_API_KEY$"),
    ],
)
def test_an_error_that_waiting_cannot_fix_ends_the_evaluation_with_a_remedy(
    tmp_path: Path, openai: OpenAIServer, monkeypatch: pytest.MonkeyPatch,
    status: int, variables: tuple[str, ...], expected: str,
) -> None:  # fmt: skip
    for name in BOTH_KEYS:
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "wrong")
    openai.failures = [status]
    with pytest.raises(EvaluationError, match=f"returned status {status}: no; .*{expected}"):
        evaluate(a_run(tmp_path, openai))
    assert not (tmp_path / "run").exists()


def test_an_unreachable_server_ends_the_evaluation_at_its_deadline(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"could not be reached .*raise learner\.evaluation\.timeout_s"):
        evaluate(a_run(tmp_path, None, "--learner.evaluation.timeout-s", "0.5"))


def test_an_answer_with_too_few_completions_is_an_error(tmp_path: Path, openai: OpenAIServer) -> None:
    openai.num_lost = 1
    flags = ["--learner.evaluation.num-samples", "2", "--learner.evaluation.temperature", "1.0"]
    with pytest.raises(EvaluationError, match=r"returned 1 completion instead of .*num_samples = 2"):
        evaluate(a_run(tmp_path, openai, *flags))


def test_a_failing_reward_function_ends_the_evaluation_without_a_record(tmp_path: Path, openai: OpenAIServer) -> None:
    with pytest.raises(RewardError, match="broken raised KeyError"):
        evaluate(a_run(tmp_path, openai, functions=("right", "broken")))
    assert not (tmp_path / "run").exists()


def test_a_late_reward_affects_only_its_prompt(
    tmp_path: Path, openai: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    made = evaluate(a_run(tmp_path, openai, "--learner.reward.timeout-s", "2", functions=("late_once",)))[0]
    assert made.reward is not None and made.reward.mean == 1.0
    assert sum(reward is None for reward in made.rewards_P) == 1
    (expected,) = [message for message in caplog.messages if "one prompt of the evaluation has no reward" in message]
    assert "did not return within 2 s" in expected


def test_an_evaluation_can_use_other_prompts_than_the_run(tmp_path: Path, openai: OpenAIServer) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"{n}>", "answer": str(n)}) + "\n" for n in (7, 8, 9)))
    flags = ["--learner.evaluation.path", str(other), "--learner.evaluation.num-prompts", "2"]
    made = evaluate(a_run(tmp_path, openai, *flags))[0]
    assert made.num_prompts == 2 and "other.jsonl" in made.data and made.reward is not None and made.reward.mean == 1.0


@pytest.mark.parametrize(("task", "options"), [("reverse", {}), ("sort", {}), ("calculator", {"num_prompts": 1000})])
def test_an_evaluation_of_the_runs_task_has_prompts_that_the_run_does_not_train_on(
    tmp_path: Path, task: str, options: dict[str, Any]
) -> None:
    data = {"task": task} | options
    run_inputs = RunInputs(make_run(tmp_path, "tcp://x:1", data=data, evaluation={"task": task, "num_prompts": 500}))
    trained = {run_inputs.prompts.prompt_at(index).prompt for index in range(len(run_inputs.prompts))}
    evaluated = {prompt.prompt for prompt in sets_of(run_inputs)[0].prompts}
    assert len(evaluated) == 500 and not trained & evaluated


def test_a_task_without_enough_prompts_that_the_run_does_not_train_on_is_refused(tmp_path: Path) -> None:
    data, evaluation = {"task": "reverse", "num_digits": 2, "num_prompts": 80}, {"task": "reverse", "num_prompts": 21}
    with pytest.raises(
        DataError, match=r"fewer than 101 distinct prompts: 80 that .* and 21 others .*data\.num_digits"
    ):
        sets_of(RunInputs(make_run(tmp_path, "tcp://x:1", data=data, evaluation=evaluation)))


def test_another_split_of_the_runs_dataset_is_read_with_the_runs_options() -> None:
    data = DataConfig(
        dataset="openai/gsm8k", dataset_config="main", revision="abc", split="train", prompt_column="question"
    )

    def body(**evaluation: Any) -> DataConfig:
        return evaluated_data(EvaluationConfig(**evaluation), data)

    own = body(dataset="openai/gsm8k")
    assert (own.dataset_config, own.revision, own.split, own.prompt_column) == ("main", "abc", "test", "question")
    part = body(split="test", dataset_config="socratic")
    assert (part.dataset, part.dataset_config, part.split, part.revision) == (data.dataset, "socratic", "test", "abc")
    assert (body(split="test").dataset_config, body(dataset_config="socratic").split) == ("main", "train")
    assert body().split == "train"
    other = body(dataset="another/one", split="validation")
    assert (other.dataset_config, other.revision, other.split) == (None, None, "validation")
    assert body(dataset="another/one", dataset_config="hard").dataset_config == "hard"
    assert body(dataset="openai/gsm8k", dataset_config="socratic").dataset_config == "socratic"
    file = body(path="rows.jsonl")
    assert (file.path, file.dataset, file.dataset_config, file.shuffle) == ("rows.jsonl", None, None, False)


def test_a_set_inherits_keys_from_its_section() -> None:
    sets = {"own": {"path": "a.jsonl", "max_tokens": 7}, "same": {"temperature": 0.0, "num_samples": 1}}
    raw = {"task": "sort", "num_prompts": 9, "num_samples": 4, "temperature": 1.0, "sets": sets}
    config = msgspec.convert(raw, EvaluationConfig)
    own, same = config.of_set("own"), config.of_set("same")
    assert (own.task, own.path, own.max_tokens, own.num_prompts, own.temperature) == (None, "a.jsonl", 7, 9, 1.0)
    assert (same.task, same.path, same.num_samples, same.temperature) == ("sort", None, 1, 0.0)
    of_dataset = {"dataset": "d", "dataset_config": "main", "sets": {"same": {}, "other": {"dataset": "e"}}}
    config_of = {name: msgspec.convert(of_dataset, EvaluationConfig).of_set(name) for name in ("same", "other")}
    assert (config_of["same"].dataset_config, config_of["other"].dataset_config) == ("main", None)
    assert config.set_names() == ["own", "same"] and EvaluationConfig().set_names() == [None]


def test_sets_that_name_the_datasets_inherit_the_split() -> None:
    sets = {"a": {"dataset": "d"}, "b": {"dataset": "d", "split": "train"}}
    config = msgspec.convert({"split": "validation", "sets": sets}, EvaluationConfig).in_effect()
    assert [config.of_set(name).in_effect().split for name in sets] == ["validation", "train"]


def test_the_command_evaluates_sets_and_their_keys_are_flags(tmp_path: Path, openai: OpenAIServer) -> None:
    flags = ["--learner.evaluation.sets.few.num-prompts", "3", "--learner.evaluation.sets.all.max-tokens", "4"]
    run = a_run(tmp_path, openai, *flags)
    config = tmp_path / "again.toml"
    config.write_text(to_toml(run))
    assert load_config(LearnerRun, [str(config)], "learner evaluate") == run
    made = evaluate(run)
    assert [(one.set_name, one.num_prompts) for one in made] == [("few", 3), ("all", 10)]
    assert format_evaluation(made[0]).startswith("few: 3 prompts of ")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("num_prompt = 3", r"sets\.hard\.num_prompt = 3; did you mean .*hard\.num_prompts"),
        ('num_prompts = "all"', r"sets\.hard\.num_prompts = 'all': Expected `int"),
    ],
)
def test_an_invalid_key_of_a_set_is_reported_with_its_set(tmp_path: Path, key: str, expected: str) -> None:
    config = tmp_path / "typo.toml"
    config.write_text(to_toml(a_run(tmp_path, None)) + f"\n[learner.evaluation.sets.hard]\n{key}\n")
    with pytest.raises(ConfigError, match=rf"learner\.evaluation\.{expected}"):
        load_config(LearnerRun, [str(config)], "learner evaluate")


def test_an_unknown_key_of_a_set_in_a_flag_is_reported_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^flags: unknown key learner\.\S+hard\.num_prompt = 3; did you mean \S+prompts"
    ):
        a_run(tmp_path, None, "--learner.evaluation.sets.hard.num-prompt", "3")


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"path": "absent.jsonl"}, "^learner.evaluation.path = 'absent.jsonl' cannot be read"),
        (
            {"task": "sumz"},
            "^learner.evaluation.task = 'sumz' is .* set learner.evaluation.path or learner.evaluation.",
        ),
        ({"num_prompts": 9999, "sets": {"hard": {"task": "sums"}}}, "^learner.evaluation.num_prompts = 9999 is more"),
        ({"sets": {"hard": {"path": "absent.jsonl"}}}, "^learner.evaluation.sets.hard.path = 'absent.jsonl' cannot"),
        (
            {"sets": {"hard": {"task": "sumz"}}},
            "set learner.evaluation.sets.hard.path or learner.evaluation.sets.hard.",
        ),
        ({}, "^learner.data.num_digits = 19 is more than the 18"),
    ],
)
def test_an_error_of_the_data_names_the_key_of_its_evaluation(
    tmp_path: Path, evaluation: dict[str, Any], expected: str
) -> None:
    data = {"task": "reverse", "num_prompts": 4, "num_digits": 19}
    run = make_run(tmp_path, "tcp://127.0.0.1:1", data=data, evaluation=evaluation)
    with pytest.raises(DataError, match=expected):
        sets_of(RunInputs(run))


def test_the_evaluation_url_follows_the_address_of_the_server(tmp_path: Path) -> None:
    def url_of(text: str, *flags: str) -> str:
        config = tmp_path / "run.toml"
        config.write_text(
            f'model = "tiny:digits"\nrun_dir = "{tmp_path}"\n{text}\n[learner]\nsteps = 1\ndata = {{task = "sort"}}\n'
            'reward = {functions = ["exact_match"]}\n'
        )
        return load_config(LearnerRun, [str(config), *flags], "learner train").evaluation_url

    assert url_of("") == "http://127.0.0.1:8000/v1"
    nodes = 'insecure = true\nendpoints = ["tcp://node1:5757", "tcp://node2:5757"]\n'
    assert url_of(nodes + "[server]\nhttp_port = 9000") == "http://127.0.0.1:9000/v1", (
        "a loopback host implies a tunnel"
    )
    assert url_of(nodes + '[server]\nhttp_host = "0.0.0.0"') == "http://node1:8000/v1"
    assert url_of(nodes + '[server]\nhttp_host = "10.0.0.5"') == "http://10.0.0.5:8000/v1"
    assert url_of('[server]\nhttp_host = "[::1]"') == "http://[::1]:8000/v1"
    assert url_of("", "--learner.evaluation.url", "http://judge/v1") == "http://judge/v1"


@pytest.mark.parametrize("every_steps", [0, 2])
@pytest.mark.parametrize(
    ("section", "flags", "message"),
    [
        ("[server]\nhttp_port = 0", (), r"server\.http_port = 0: .* Set server\.http_port, or"),
        (
            "",
            ("--endpoints-from", "dns:nodes:5757", "--insecure"),
            "'dns:nodes:5757': the servers of the run may change",
        ),
    ],
)
def test_an_evaluation_without_a_known_server_is_refused(
    tmp_path: Path, section: str, flags: tuple[str, ...], message: str, every_steps: int
) -> None:
    recipe = Path(write_task(tmp_path))
    recipe.write_text(f"{recipe.read_text()}\n{section}\n")
    arguments = [str(recipe), *flags, "--learner.evaluation.every-steps", str(every_steps)]
    url = ("--learner.evaluation.url", "http://127.0.0.1:1/v1")
    assert load_config(LearnerRun, [*arguments, *url], "learner train").evaluation_url == url[1]
    with pytest.raises(ConfigError, match=rf"learner\.evaluation\.url is unset with .*{message}"):
        evaluate(load_config(LearnerRun, arguments, "learner train"))


def test_the_command_prints_a_table_or_json(tmp_path: Path, openai: OpenAIServer) -> None:
    arguments = ["evaluate", write_task(tmp_path), "--learner.evaluation.url", openai.url]
    done = run_here(*arguments)
    assert done.returncode == 0, done.stderr
    head, *rows, _ = done.stdout.splitlines()
    assert head.startswith("10 prompts of ") and "greedy, by policy versions 3 to 4" in head
    assert any(row.split() == ["right", "1", "[0.7225,", "1]"] for row in rows)
    made = msgspec.json.decode(run_here(*arguments, "--json").stdout, type=Evaluation)
    assert made.difference is not None and made.difference.mean == 0
