"""Turns that end as those of real families do: with a token that the tokenizer does not count among its special ones, with one that the
template puts another in the place of, or with the mark of who speaks next."""

import json
from pathlib import Path

import msgspec
import pytest

from learner.config import LearnerRun
from learner.environments.answer import HERMES, read_answer
from learner.environments.talk import continued
from learner.material import Material
from learner.prompts.chat_template import ChatTemplate, Message, Turns
from tests.learner.environments.chat_model import write_model
from tests.learner.environments.chat_tokenizer import KEEPING, chat_tokenizer

GENERATION = "{% if add_generation_prompt %}HEADER{% endif %}"
MESSAGES = "{% for message in messages %}BODY{% endfor %}"
# What each family's template puts around a message, and how its turns end; END is the eos of the tokenizer, which none of them ends with.
GEMMA = (
    "<start_of_turn>{{ message.role }}\n{{ message.content }}<end_of_turn>\n",
    "<start_of_turn>assistant\n",
    "<end_of_turn>",
)
PHI = ("<|{{ message.role }}|>{{ message.content }}<|end|>", "<|assistant|>", "<|end|>")
LLAMA = (
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>",
)  # fmt: skip
GLM = (
    "<|{{ message.role if message.role != 'tool' else 'observation' }}|>\n{{ message.content }}",
    "<|assistant|>\n",
    None,
)
OF_FAMILY = {"gemma": GEMMA, "phi": PHI, "llama": LLAMA, "glm": GLM}
ENDS = {
    "gemma": ["<end_of_turn>"], "phi": ["<|end|>", "<|endoftext|>"], "llama": ["<|eot_id|>", "<|eom_id|>"],
    "glm": ["<|user|>", "<|observation|>", "<|endoftext|>"],
}  # fmt: skip
QUESTION: list[Message] = [{"role": "user", "content": "3+4"}]
ANSWERED: list[Message] = [{"role": "tool", "content": "7", "name": "add"}]


def of_family(name: str, more_ends: bool = True) -> ChatTemplate:
    body, header, end = OF_FAMILY[name]
    tokenizer = chat_tokenizer(MESSAGES.replace("BODY", body) + GENERATION.replace("HEADER", header))
    marks = {
        "<start_of_turn>",
        "<|user|>",
        "<|assistant|>",
        "<|tool|>",
        "<|observation|>",
        *ENDS[name],
        *([end] if end else ()),
    }
    tokenizer.add_tokens(sorted(marks))  # not as special ones
    ends = tokenizer.convert_tokens_to_ids(ENDS[name]) if more_ends else []
    return ChatTemplate(tokenizer, {}, [], Turns(more_ends=frozenset(ends)))


CASES = [(name, end) for name, ends in ENDS.items() for end in ends]


@pytest.mark.parametrize(("family", "end"), CASES)
def test_what_follows_a_turn_is_what_the_template_puts_behind_it(family: str, end: str) -> None:
    template = of_family(family)
    encode, decode = template.tokenizer.encode, template.tokenizer.decode
    turn = [*encode("call", add_special_tokens=False), template.tokenizer.convert_tokens_to_ids(end)]
    said, recorded = QUESTION, template.token_ids(QUESTION)
    for _ in range(2):  # the second time the marks are there already
        said, recorded = [*said, {"role": "assistant", "content": "call"}], [*recorded, *turn]
        heard = continued(template, said, ANSWERED, turn[-1])
        assert not heard.begins_branch
        said, recorded = [*said, *ANSWERED], [*recorded, *heard.token_ids]
        whole, rendered = decode(recorded), decode(template.token_ids(said))
        own = OF_FAMILY[family][2]
        if own is not None:
            assert whole.replace(end, own) == rendered
        elif end == "<|observation|>":
            assert whole == rendered
        else:  # it was ended by the mark of somebody else
            assert whole.replace(end, "") == rendered.replace(end, "")


@pytest.mark.parametrize(("family", "end"), CASES)
def test_the_end_is_no_content(family: str, end: str) -> None:
    template = of_family(family)
    ids = template.tokenizer.encode("7" + end, add_special_tokens=False)
    assert template.spoken(ids) == read_answer(template, template.token_ids(QUESTION), ids)["content"] == "7"


@pytest.mark.parametrize(
    ("family", "end"), [("gemma", "<end_of_turn>"), ("phi", "<|end|>"), ("llama", "<|eot_id|>"), ("glm", "<|user|>")]
)
def test_the_warm_start_teaches_the_end_of_the_template(family: str, end: str) -> None:
    template = of_family(family)
    assert template.turn_end() == template.tokenizer.convert_tokens_to_ids(end)
    assert of_family(family, more_ends=False).turn_end() == template.tokenizer.eos_token_id


def test_the_ends_are_those_of_the_models_generation_config(tmp_path: Path) -> None:
    write_model(tmp_path, KEEPING, HERMES)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": QUESTION}) + "\n")
    settings = {"steps": 1, "data": {"path": str(data)}, "reward": {"functions": ["exact_match"]}}
    run = msgspec.convert({"model": str(tmp_path), "run_dir": "runs/x", "learner": settings}, LearnerRun)
    own = chat_tokenizer().eos_token_id
    assert Material(run).prompts.template.ends == {own}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert Material(run).prompts.template.ends == {5, 7, own}
