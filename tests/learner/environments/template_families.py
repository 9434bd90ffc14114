"""Chat formats of the model families that users train: templates, turns that a policy writes, and ends of turns.

families/*.jinja were written for these tests from the published format of each family, without the tool instructions of
the real templates. Turns are written here and not taken from the template, so that the two can be compared.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from learner.prompts.chat_template import ChatTemplate, Message, TurnFormat
from tests.learner.environments.chat_tokenizer import chat_tokenizer

QUESTION: list[Message] = [{"role": "user", "content": "How much?"}]
PARAMETERS = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add a number.", "parameters": PARAMETERS}}]
ADD = ("add", {"number": 2})
Arguments = dict[str, Any]
JSON_CALL = '{{"name": "{name}", "arguments": {arguments}}}'


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a family's turns. An empty attribute: the family has no such thing."""

    ends: str
    """End tokens of the generation_config. A turn ends with the first."""
    marks: str = ""
    """Other special tokens."""
    tags: str = ""
    """Other tokens that are never split."""
    eos: str | None = None
    """End token of the tokenizer, if it is not the first of `ends`."""
    begin: str | None = None
    """Token that the tokenizer prepends to texts."""
    renderer: str | None = None
    think: str | None = None
    call: str | None = None
    field: str | None = None
    """Format of one argument, if the arguments of a call are not JSON. They replace {arguments}."""
    between_fields: str = ""
    between_calls: str = "\n"
    around_calls: str = "{}"
    end_of_calls: str | None = None
    """End token of a turn with calls, if it differs."""
    before_content: str = ""
    always_thinks: bool = False
    """Whether turns without reasoning have an empty reasoning block."""
    max_calls: int = 2
    """Maximum number of calls in one turn."""
    opened: str = ""
    """Start of the turn that the prompt already contains."""

    def write_turn(
        self, content: str = "", *, calls: Sequence[tuple[str, Arguments]] = (), reasoning: str | None = None
    ) -> str:
        """Return a turn with its end token."""
        thought = (
            self.think.format(reasoning or "") if self.think is not None and (reasoning or self.always_thinks) else ""
        )
        body = thought.removeprefix(self.opened) + (self.before_content + content if content else "")
        if not calls:
            return body + self.ends.split()[0]
        written = self.between_calls.join(self._call(name, arguments) for name, arguments in calls)
        return body + self.around_calls.format(written) + (self.end_of_calls or self.ends.split()[0])

    def _call(self, name: str, arguments: Arguments) -> str:
        assert self.call is not None
        if self.field is None:
            return self.call.format(name=name, arguments=json.dumps(arguments))
        fields = [self.field.format(key=key, value=value) for key, value in arguments.items()]
        return self.call.format(name=name, arguments=self.between_fields.join(fields))


HERMES = "<tool_call>\n" + JSON_CALL + "\n</tool_call>"
THINK = "<think>\n{}\n</think>\n\n"
THINK_TAGS = "<think> </think>"
QWEN_TAGS = f"{THINK_TAGS} <tool_call> </tool_call> <tool_response> </tool_response>"
GLM_TAGS = f"{QWEN_TAGS} <arg_key> </arg_key> <arg_value> </arg_value>"
GLM_MARKS = "[gMASK] <sop> <|system|> <|assistant|>"
FAMILIES = {
    "qwen2.5": Family(ends="<|im_end|> <|endoftext|>", marks="<|im_start|>", tags="<tool_call> </tool_call>",
        call=HERMES),
    "qwen3": Family(ends="<|im_end|> <|endoftext|>", marks="<|im_start|>", tags=QWEN_TAGS, think=THINK, call=HERMES),
    "qwen3.5": Family(
        ends="<|im_end|> <|endoftext|>",
        marks="<|im_start|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>", tags=QWEN_TAGS,
        renderer="qwen3.5", think=THINK, always_thinks=True, opened="<think>\n",
        field="<parameter={key}>\n{value}\n</parameter>\n",
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
    ),
    "llama3": Family(
        ends="<|eot_id|> <|end_of_text|> <|eom_id|>", marks="<|start_header_id|> <|end_header_id|> <|python_tag|>",
        begin="<|begin_of_text|>",
        renderer="llama-3", max_calls=1, call='{{"name": "{name}", "parameters": {arguments}}}',
    ),
    "mistral": Family(
        ends="</s>", marks="[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] "
                           "[/TOOL_RESULTS]", begin="<s>",
        call=JSON_CALL, between_calls=", ", around_calls="[TOOL_CALLS][{}]",
    ),
    "gemma3": Family(ends="<end_of_turn> <eos>", eos="<eos>", marks="<start_of_turn>", begin="<bos>"),
    "gemma4": Family(
        ends="<turn|> <eos> <|tool_response>",
        marks="<|turn> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|> <tool_response|> "
              "<|image> <|image|> <image|>",
        begin="<bos>", renderer="gemma4", think="<|channel>thought\n{}\n<channel|>",
        call="<|tool_call>call:{name}{{{arguments}}}<tool_call|>",
        field="{key}:{value}", between_fields=",", between_calls="", end_of_calls="<|tool_response>",
    ),
    "phi3.5": Family(ends="<|end|> <|assistant|> <|endoftext|>", eos="<|endoftext|>", marks="<|system|> <|user|>"),
    "phi4": Family(ends="<|im_end|> <|endoftext|>", marks="<|im_start|> <|im_sep|>"),
    "phi4-mini": Family(
        ends="<|end|> <|endoftext|>", eos="<|endoftext|>",
        marks="<|system|> <|user|> <|assistant|> <|tool|> <|/tool|> <|tool_call|> <|/tool_call|>",
        call=JSON_CALL, between_calls=", ", around_calls="<|tool_call|>[{}]<|/tool_call|>",
    ),
    "glm4.5": Family(
        ends="<|user|> <|observation|> <|endoftext|>", eos="<|endoftext|>", marks=GLM_MARKS, tags=GLM_TAGS,
        renderer="glm-4.5", think="\n<think>{}</think>", always_thinks=True, before_content="\n",
        call="\n<tool_call>{name}\n{arguments}</tool_call>",
        field="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        between_calls="", end_of_calls="<|observation|>",
    ),
    "glm5": Family(
        ends="<|user|> <|observation|> <|endoftext|>", eos="<|endoftext|>", marks=GLM_MARKS, tags=GLM_TAGS,
        renderer="glm-5", think="<think>{}</think>", always_thinks=True, opened="<think>",
        call="<tool_call>{name}{arguments}</tool_call>", field="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        between_calls="", end_of_calls="<|observation|>",
    ),
    "gpt-oss": Family(
        ends="<|return|> <|call|> <|endoftext|>", marks="<|start|> <|end|> <|message|> <|channel|> <|constrain|>",
        before_content="<|channel|>final<|message|>",
    ),
    "smollm2": Family(ends="<|im_end|>", marks="<|im_start|>"),
    "smollm3": Family(ends="<|im_end|>", marks="<|im_start|>", tags=THINK_TAGS, think=THINK, call=HERMES),
    "deepseek-r1-distill": Family(
        ends="<|end_of_sentence|>", marks="<|User|> <|Assistant|>", tags=THINK_TAGS, begin="<|begin_of_sentence|>",
        think=THINK, always_thinks=True, opened="<think>\n",
    ),
    "granite": Family(
        ends="<|end_of_text|>", marks="<|start_of_role|> <|end_of_role|> <|tool_call|>", call=JSON_CALL,
        between_calls=", ",
        around_calls="<|tool_call|>[{}]",
    ),
    "olmo2": Family(ends="<|endoftext|>", begin="<|endoftext|>"),
}  # fmt: skip


def chat_of(name: str, tools: list[dict[str, Any]]) -> ChatTemplate:
    """Return the chat template that the learner builds for a model of the family."""
    family = FAMILIES[name]
    tokenizer = chat_tokenizer((Path(__file__).parent / "families" / f"{name}.jinja").read_text())
    ends = family.ends.split()
    marks = [*family.marks.split(), *([family.begin] if family.begin else [])]
    tokenizer.add_tokens(marks, special_tokens=True)
    # In some families the end tokens are not special tokens of the tokenizer.
    tokenizer.add_tokens([*family.tags.split(), *ends])
    tokenizer.eos_token, tokenizer.bos_token = family.eos or ends[0], family.begin
    return ChatTemplate(
        tokenizer, {}, tools, TurnFormat(family.renderer, frozenset(tokenizer.convert_tokens_to_ids(ends)))
    )


def encoded(template: ChatTemplate, text: str) -> list[int]:
    return list(template.tokenizer.encode(text, add_special_tokens=False))
