"""Prompts: every source, plain and conversational, once per data epoch, with actionable errors."""

import json
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from learner.config import DataConfig
from learner.prompts.prompts import Prompts
from learner.run_inputs import RunInputs
from protocol.errors import DataError
from tests.learner.environments.chat_tokenizer import START, chat_tokenizer
from tests.learner.prompts.data_files import CHAT_TEMPLATE, all_of, write_jsonl
from tests.learner.runs import make_run

# --- order -------------------------------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_prompts=st.integers(1, 40), seed=st.integers(-5, 2**40), epoch=st.integers(0, 1000), shuffle=st.booleans())
def test_every_epoch_holds_each_prompt_exactly_once(tokenizer, num_prompts, seed, epoch, shuffle):
    prompts = Prompts(DataConfig(task="reverse", num_prompts=num_prompts, shuffle=shuffle), tokenizer, seed)
    slots = range(epoch * num_prompts, (epoch + 1) * num_prompts)
    rows = [prompts.prompt_at(slot).prompt_id for slot in slots]
    assert sorted(rows) == list(range(num_prompts))
    assert {prompts.epoch_of(slot) for slot in slots} == {epoch}
    if not shuffle:
        assert rows == list(range(num_prompts))


def test_a_slot_holds_the_same_prompt_in_another_process_and_out_of_order(tokenizer):
    config = DataConfig(task="reverse", num_prompts=20)
    first, second = Prompts(config, tokenizer, 7), Prompts(config, tokenizer, 7)
    slots = [55, 3, 41, 0, 19, 20]
    assert [first.prompt_at(slot) for slot in range(60)][55] == second.prompt_at(55)
    assert [first.prompt_at(slot) for slot in slots] == [second.prompt_at(slot) for slot in slots]


def test_the_order_differs_between_epochs_and_seeds(tokenizer):
    first, other = (Prompts(DataConfig(task="reverse", num_prompts=50), tokenizer, seed) for seed in (0, 1))
    order = [first.prompt_at(slot).prompt_id for slot in range(100)]
    assert order[:50] != order[50:] and order[:50] != [other.prompt_at(slot).prompt_id for slot in range(50)]


# --- sources -----------------------------------------------------------------------------------------------------


def test_jsonl_and_a_dataset_on_disk_give_the_same_prompts(tokenizer, sources):
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "level": i} for i in range(6)]
    first, second = (
        all_of(Prompts(DataConfig(**one, prompt_column="question"), tokenizer, 0)) for one in sources(rows)
    )
    assert first == second and first[3].columns == {"answer": "6", "level": 3}
    assert tokenizer.decode(first[3].token_ids) == "3+3="
    for source in sources(rows):
        with pytest.raises(
            DataError, match=r"no column 'prompt'; its columns are: question, answer, level. Set .*prompt_column"
        ):
            Prompts(DataConfig(**source), tokenizer, 0)


def test_a_split_of_a_saved_dataset_dict_and_a_directory_of_data_files_can_be_named(tokenizer, tmp_path):
    import datasets

    splits = {"train": [{"prompt": "1"}], "test": [{"prompt": "2"}, {"prompt": "3"}]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    config = DataConfig(dataset=str(tmp_path / "saved"), split="test")
    assert [prompt.prompt for prompt in all_of(Prompts(config, tokenizer, 0))] == ["2", "3"]
    with pytest.raises(DataError, match=r"no split 'dev'; its splits are: train, test"):
        Prompts(DataConfig(dataset=str(tmp_path / "saved"), split="dev"), tokenizer, 0)

    saved["train"].save_to_disk(str(tmp_path / "unnamed"))
    assert len(Prompts(DataConfig(dataset=str(tmp_path / "unnamed"), split="any"), tokenizer, 0)) == 1

    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", splits["test"])
    assert len(Prompts(DataConfig(dataset=str(tmp_path / "files")), tokenizer, 0)) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split": "validation"}, "no split 'validation'; its splits are: train. Set"),
        ({"dataset_config": "main"}, r"dataset_config = 'main' selects nothing .* unset dataset_config"),
        ({"revision": "abc"}, r"revision = 'abc' selects nothing .* unset revision"),
    ],
)
def test_a_saved_split_is_no_other_part_of_its_dataset(tokenizer, tmp_path, keys, message):
    import datasets

    saved = str(tmp_path / "saved")
    datasets.Dataset.from_list([{"prompt": "1"}], split="train").save_to_disk(saved)
    assert len(Prompts(DataConfig(dataset=saved), tokenizer, 0)) == 1
    with pytest.raises(DataError, match=message):
        Prompts(DataConfig(dataset=saved, **keys), tokenizer, 0)


def test_a_number_of_prompts_takes_the_first(tokenizer, sources):
    for source in sources([{"prompt": str(i)} for i in range(6)]):
        prompts = all_of(Prompts(DataConfig(**source, num_prompts=2), tokenizer, 0))
        assert [prompt.prompt for prompt in prompts] == ["0", "1"]
        assert len(Prompts(DataConfig(**source, num_prompts=9), tokenizer, 0)) == 6


def test_a_line_separator_inside_a_text_does_not_split_a_line(of_rows):
    prompts = of_rows({"prompt": "1", "note": "a\u2028b\x85c"})
    assert prompts.prompt_at(0).columns == {"note": "a\u2028b\x85c"}


def test_an_escaped_emoji_is_a_character(tokenizer, tmp_path):
    (tmp_path / "emoji.jsonl").write_text(r'{"prompt": "1", "note": "\uD83D\ude00 or \\ud83d"}')
    prompts = Prompts(DataConfig(path=str(tmp_path / "emoji.jsonl")), tokenizer, 0)
    assert prompts.prompt_at(0).columns == {"note": "\N{GRINNING FACE} or \\ud83d"}


# --- conversations -----------------------------------------------------------------------------------------------


USER, BEGUN = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2+"}
SYSTEM = {"role": "system", "content": "7"}


@pytest.mark.parametrize(
    ("row", "config", "shown"),
    [
        ([USER], {}, "+1+1>"),
        ([USER, BEGUN], {}, "+1+1+2+"),
        ([USER, BEGUN | {"content": [{"type": "text", "text": "2+"}]}], {}, "+1+1+2+"),
        ([USER, BEGUN | {"content": ""}], {}, "+1+1+>"),
        ([USER, BEGUN], {"goes_on": False}, "+1+1+2+>"),
        ([USER, {"role": "user", "content": "2"}], {}, "+1+1+2>"),
        ("1+1", {"system_prompt": "42"}, "=42=+1+1>"),
        ("1+1", {"system_prompt": ""}, "+1+1>"),
        ([SYSTEM, USER], {"system_prompt": "42"}, "=7=+1+1>"),
    ],
    ids=str,
)
def test_a_conversation_is_rendered_with_a_system_prompt_and_a_started_answer(tokenizer, of_rows, row, config, shown):
    prompt = of_rows({"prompt": row}, **config).prompt_at(0)
    assert tokenizer.decode(prompt.token_ids) == shown
    assert all(type(token_id) is int for token_id in prompt.token_ids)
    assert (prompt.prefill == "2+") == shown.endswith("2+")
    if row == "1+1":
        system = [{"role": "system", "content": "42"}] if config["system_prompt"] else []
        assert prompt.prompt == [*system, USER]
    else:
        assert prompt.prompt == row


@pytest.mark.parametrize(("content", "shown"), [("2+ ", "+1+1+2+ "), (" ", "+1+1+ >")])
def test_a_started_answer_keeps_whitespace_that_a_template_trims(tokenizer, of_rows, monkeypatch, content, shown):
    trimming = CHAT_TEMPLATE.replace("+{{ message['content'] }}", "+{{ message['content'] | trim }}")
    monkeypatch.setattr(tokenizer, "chat_template", trimming)
    prompt = of_rows({"prompt": [USER, BEGUN | {"content": content}]}).prompt_at(0)
    assert tokenizer.decode(prompt.token_ids) == shown.replace("+ >", "+>")
    assert prompt.prefill == (content if content.strip() else None)


HIDES = "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "row", "problem"),
    [
        (None, [USER], "has no chat template; use an instruct model"),
        ("{{ raise_exception('roles must alternate') }}", [USER],
            r"row 0 of .* template cannot render the conversation: roles must alternate"),
        (HIDES, [BEGUN], r"row 0 of .* the final message does not appear in the chat"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_render_a_conversation_is_an_error(
    tokenizer, of_rows, monkeypatch, template, row, problem
):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(DataError, match=problem):
        of_rows({"prompt": row})


TOOLS = [
    {"type": "function", "function": {"name": "4", "parameters": {"type": "object", "properties": {}, "extra": None}}}
]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["objects", "as JSON"])
def test_a_row_can_have_its_own_tools(tokenizer, of_rows, monkeypatch, tools):
    shown = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{{ 9 if 'extra' in tool.function.parameters }}{% "
        "endfor %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", shown + CHAT_TEMPLATE)
    rows = {"prompt": [USER], "tools": tools}, {"prompt": [USER]}
    prompts = of_rows(*rows)
    assert [tokenizer.decode(prompts.prompt_at(i).token_ids) for i in (0, 1)] == ["4+1+1>", "+1+1>"]
    agents = of_rows(*rows, goes_on=False)
    assert tokenizer.decode(agents.prompt_at(0).token_ids) == "+1+1>"
    own = [{"type": "function", "function": {"name": "5", "parameters": {}}}]
    assert tokenizer.decode(of_rows(*rows, tools=lambda: own).prompt_at(0).token_ids) == "5+1+1>"


@pytest.mark.parametrize("tools", ["search", 3, ["search"]], ids=str)
def test_invalid_tools_are_an_error_with_the_row(of_rows, tools):
    assert len(of_rows({"prompt": "1", "tools": tools})) == 1
    with pytest.raises(DataError, match=r"row 0 of .* in column 'tools'; expected a list of JSON schemas"):
        of_rows({"prompt": [USER], "tools": tools})


def test_a_rendered_text_gets_a_single_start_token(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.bos_token = START
    begin = tokenizer.bos_token_id
    single = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, begin)])
    tokenizer.backend_tokenizer.post_processor = single
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1"}, {"prompt": f"{START}1+1"}, {"prompt": f"1{START}+1"}])
    prompts = Prompts(DataConfig(path=path, shuffle=False), tokenizer, 0)
    first, second, third = (prompts.prompt_at(i).token_ids for i in range(3))
    assert first == second and first.count(begin) == 1 and third.count(begin) == 2


# --- errors ------------------------------------------------------------------------------------------------------


def test_a_bad_line_is_an_error_with_file_and_line(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    for line, problem in (
        ('{"prompt": 1', "is not valid JSON"),
        ("[", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "is a JSON list"),
        ('{"x": 1}', "no column"),
        (r'{"prompt": "1\ud83d"}', r"has half of a surrogate pair, \\ud83d, .* remove the row"),
        (r'{"prompt": "1", "notes": [{"\uDE00": 1}]}', r"has half of a surrogate pair, \\ude00"),
    ):
        for before, number in (('{"prompt": "1"}\n\n', 3), ("", 1)):
            path.write_text(f"{before}{line}\n")
            with pytest.raises(DataError, match=rf"a.jsonl:{number} .*{problem}"):
                Prompts(DataConfig(path=str(path)), tokenizer, 0)


def test_a_file_may_begin_with_the_mark_of_windows(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1"}\n', "utf-8-sig")
    assert len(Prompts(DataConfig(path=str(tmp_path / "a.jsonl")), tokenizer, 0)) == 1


@pytest.mark.parametrize("prompt", [17, "", [], [{"role": "user"}], [{"role": ["user"], "content": "1"}], None])
def test_a_prompt_of_the_wrong_type_is_an_error_with_the_row(of_rows, prompt):
    with pytest.raises(DataError, match=r"row 1 of .* expected a non-empty text or a non-empty list of messages"):
        of_rows({"prompt": "1"}, {"prompt": prompt})


def test_content_that_is_not_text_is_an_error_unless_an_agent_reads_it(of_rows):
    question = {"type": "text", "text": "1+1", "image": None}
    for other in ({"type": "image", "image": "a.png", "text": None}, "1"):
        row = {"prompt": [{"role": "user", "content": [other, question]}]}
        with pytest.raises(DataError, match=r"row 0 of .* which is not only text; the policy sees only text. Remove"):
            of_rows(row)
        assert len(of_rows(row, goes_on=False)) == 1
    assert len(of_rows({"prompt": [{"role": "user", "content": [question]}, BEGUN | {"content": None}]})) == 1


def test_texts_and_conversations_are_not_mixed_in_a_run_with_an_environment(tmp_path, of_rows):
    text, conversation = {"prompt": "1", "secret": 1}, {"prompt": [USER], "secret": 2}
    for rows, kinds in (
        ([text, text, conversation], "are texts, but the prompt in row 2 is a conversation"),
        ([conversation, text], "are conversations, but the prompt in row 1 is a text"),
    ):
        with pytest.raises(DataError, match=rf"{kinds}; expected prompts of one kind with x, .* Make them alike"):
            of_rows(*rows).check_one_kind("x")
    for alike in (of_rows(text, text), of_rows(conversation), of_rows(text, conversation, system_prompt="")):
        alike.check_one_kind("x")

    path = write_jsonl(tmp_path / "mixed.jsonl", [text, conversation])
    for environment in ({"factory": "guess"}, {"agent": "m:f"}, {}):
        reward = {"functions": ["environment_reward" if environment else "think_format"]}
        run = make_run(tmp_path, "tcp://a:1", data={"path": path}, environment=environment, reward=reward)
        inputs = RunInputs(run)
        inputs.tokenizer.chat_template = CHAT_TEMPLATE
        if "factory" in environment:
            with pytest.raises(DataError, match="row 1 is a conversation; expected prompts of one kind with"):
                inputs.prompts  # noqa: B018
        else:
            assert len(inputs.prompts) == 2


def test_a_prompt_that_later_turns_render_again_is_not_truncated(tmp_path):
    long = {"role": "user", "content": "1234567890"}
    for environment, prompt, is_refused in (
        ({"tools": ["tests.learner.environments.trl_examples:multiply"]}, [long], True),
        ({"factory": "guess"}, long["content"], False),
        ({"agent": "m:f"}, long["content"], True),
        ({}, [long], False),
    ):
        data = {"path": write_jsonl(tmp_path / "long.jsonl", [{"prompt": prompt, "secret": 1}] * 2)}
        data |= {"overlong_prompts": "truncate", "max_prompt_tokens": 6}
        reward = {"functions": ["think_format"]}  # which reads no column
        inputs = RunInputs(make_run(tmp_path, "tcp://a:1", data=data, environment=environment, reward=reward))
        inputs.tokenizer.chat_template = CHAT_TEMPLATE
        with pytest.raises(DataError, match=r"2 of 2 prompts have more than .* = 6") if is_refused else nullcontext():
            assert len(inputs.prompts) == 2


def test_a_missing_or_empty_file_or_dataset_is_an_error(tokenizer, tmp_path, of_rows):
    with pytest.raises(DataError, match="has no prompts"):
        of_rows()
    with pytest.raises(DataError, match=r"learner.data.path = .*none.jsonl' cannot be read"):
        Prompts(DataConfig(path=str(tmp_path / "none.jsonl")), tokenizer, 0)
    with pytest.raises(DataError, match=r"learner.data.dataset = .*none' .*cannot be loaded"):
        Prompts(DataConfig(dataset=str(tmp_path / "none")), tokenizer, 0)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "train.jsonl").write_text('{"prompt": "1"}\n[1]\n')
    with pytest.raises(DataError, match=r"cannot be loaded: .*JSON"):
        Prompts(DataConfig(dataset=str(tmp_path / "damaged")), tokenizer, 0)
