"""A user's file of reward functions: two from the Hugging Face course on GRPO, and several that misbehave."""

import os
import re
import signal
import sys
import time


def reward_len(completions, **kwargs):
    ideal_length = 20
    return [-abs(ideal_length - len(completion)) for completion in completions]


def problem_reward(completions, answers, **kwargs):
    rewards = []
    for completion, correct_answer in zip(completions, answers, strict=True):
        found = re.search(r"<answer>(.*?)</answer>", completion)
        rewards.append(1.0 if found and found.group(1) == correct_answer else 0.0)
    return rewards


def sees_what_trl_passes(prompts, completions, completion_ids, answer, level, **kwargs):
    assert prompts == [[{"role": "user", "content": "2+2"}]] * 2
    assert completions == [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]]
    assert completion_ids == [[7], [8]]
    assert (answer, level, set(kwargs)) == (["4", "4"], [1, 1], {"trainer_state", "log_extra", "log_metric"})
    return [float(completion[0]["content"] == gold) for completion, gold in zip(completions, answer, strict=True)]


def progress(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def changes_its_row(prompts, completions, hints, **kwargs):
    rewards = []
    for prompt, completion, hint in zip(prompts, completions, hints, strict=True):
        prompt.extend(completion)
        rewards.append(float(len(prompt) + len(hint["texts"])))
        hint["texts"].pop()
    return rewards


async def asynchronous(completions, **kwargs):
    return [1.0 for _ in completions]


def number_of_messages(completions, **kwargs):
    return [float(len(completion)) for completion in completions if completion[0]["role"] == "assistant"]


def raises(completions, **kwargs):
    return [1 / len(text) for text in ["", *completions]]


def returns_one(completions, **kwargs):
    return [1.0]


def returns_text(completions, **kwargs):
    return ["good" for _ in completions]


def returns_nan(completions, **kwargs):
    return [float("nan") for _ in completions]


def returns_nothing(completions, **kwargs):
    pass


def returns_huge(completions, **kwargs):
    return [10**400 for _ in completions]


def returns_matrix(completions, **kwargs):
    import torch

    return torch.ones(3, 2)


def yields_and_raises(completions, **kwargs):
    yield 1.0
    yield {}["score"]


def yields(completions, **kwargs):
    for completion in completions:
        if completion == "down":
            raise ConnectionRefusedError
        yield len(completion)


class Unseen:
    def __repr__(self):
        raise RuntimeError("no repr")


def cannot_be_shown(completions, **kwargs):
    return Unseen()


def exits(completions, **kwargs):
    sys.exit(3)


def misbehaves_on_request(completions, how, **kwargs):
    match how[0]:
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hoard":
            held = bytearray(400 << 20)
            time.sleep(len(held))
        case "sleep":
            while True:
                pass
    return [0.0 for _ in completions]


def slow_on_request(completions, seconds, **kwargs):
    time.sleep(seconds[0])
    return [0.0 for _ in completions]


def its_process(completions, **kwargs):
    return [float(os.getpid()) for _ in completions]


def loads_torch(completions, **kwargs):
    heavy = {"torch", "transformers", "zmq", "vllm", "datasets"} & set(sys.modules)
    return [float(len(heavy)) for _ in completions]


def takes_no_kwargs(completions):
    return [0.0 for _ in completions]
