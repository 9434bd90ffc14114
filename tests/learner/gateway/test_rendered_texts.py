"""Agents that render the chat template themselves and post its texts as text completions."""

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from learner.config import DataConfig
from learner.prompts.chat_template import ChatTemplate
from learner.prompts.encoding import Encoder
from tests.learner.environments.scripted_conversation import QUESTION
from tests.learner.environments.scripted_player import Script, completion
from tests.learner.environments.template_families import FAMILIES, chat_of
from tests.learner.gateway.scripted_gateway import open_episode

pytestmark = pytest.mark.anyio
CHAT = [*QUESTION, {"role": "assistant", "content": "one"}, {"role": "user", "content": "And?"}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def template_of(family: str) -> ChatTemplate:
    """Return the template of a family, whose tokenizer adds its BOS token to texts, as the published one does."""
    template, begin = chat_of(family, []), FAMILIES[family].begin
    if begin is not None:
        tokens = [(begin, template.tokenizer.convert_tokens_to_ids(begin))]
        template.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=tokens)
    return template


def saying_one(template: ChatTemplate, end: str) -> Script:
    ids = template.tokenizer.encode("one" + end, add_special_tokens=False)
    return lambda turn: completion(ids, 4)


@pytest.mark.parametrize("family", ["qwen2.5", "llama3", "mistral", "gemma3"])
async def test_an_agent_that_renders_the_template_itself_gets_the_tokens_of_the_template(family: str) -> None:
    template = template_of(family)
    end = FAMILIES[family].ends.split()[0]
    first, second = template.text(QUESTION), template.text(CHAT)
    (row,) = Encoder("rows", DataConfig(path="rows"), template).encode([{"prompt": first}], [0])["token_ids"]
    async with open_episode(saying_one(template, end), template=template) as agent:
        text = (await agent.complete(first)).choices[0].text
        assert second.startswith(first + text)
        await agent.complete(second)
        prompts = [prompt.token_ids.tolist() for prompt in agent.prompts]
        assert len(agent.end().branches) == 1
    assert prompts == [row, template.token_ids(CHAT)] and row == template.token_ids(QUESTION)


async def test_a_rendered_turn_with_another_end_than_the_recorded_one_is_another_branch() -> None:
    template = template_of("qwen2.5")
    async with open_episode(saying_one(template, "<|endoftext|>"), template=template) as agent:
        await agent.complete(template.text(QUESTION))
        await agent.complete(template.text(CHAT))
        assert agent.prompts[1].token_ids.tolist() == template.token_ids(CHAT)
        assert len(agent.end().branches) == 2


@pytest.mark.parametrize("turn", ["", "one"])
async def test_a_text_with_nothing_after_a_turn_is_continued_without_the_end_of_the_turn(turn: str) -> None:
    """An agent samples again after an empty turn, or asks for more of a turn."""
    template = template_of("qwen2.5")
    first, ids = template.text(QUESTION), template.tokenizer.encode(turn + "<|im_end|>", add_special_tokens=False)
    async with open_episode(lambda _: completion(ids, 4), template=template) as agent:
        assert (await agent.complete(first)).choices[0].text == turn
        await agent.complete(first + turn)
        assert agent.shown(1) == first + turn and len(agent.end().branches) == 2


async def test_a_text_has_special_tokens_of_the_tokenizer_only_if_the_agent_wants_them() -> None:
    template = template_of("llama3")
    begin = template.tokenizer.bos_token
    async with open_episode(saying_one(template, "<|eot_id|>"), template=template) as agent:
        for more, shown in (({}, f"{begin}Say"), ({"add_special_tokens": False}, "Say")):
            await agent.complete("Say", extra_body=more)
            assert agent.shown(-1) == shown
        with pytest.raises(openai.BadRequestError, match="add_special_tokens = True is not supported"):
            await agent.chat(QUESTION, extra_body={"add_special_tokens": True})
