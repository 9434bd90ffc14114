"""Tool calls, reasoning and chat template of vLLM's OpenAI application, as in `vllm serve`.

[server] ─▶ known? fits the tokenizer? readable? (before the model is loaded) ─▶ application arguments
"""

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from vllm.exceptions import VLLMClientError
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import load_chat_template
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

from inference_server.config import ServerConfig
from protocol.errors import ConfigError

GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tag that transformers adds to Jinja, around the assistant's text."""


def check_openai_options(server: ServerConfig, model_path: Path | None) -> None:
    """Check the OpenAI options, as far as possible without loading the model.

    If `model_path` is None, the tokenizer is not on this machine yet and is not checked.

    Raises:
        ConfigError: A name is unknown, a parser does not fit the tokenizer, or the template is unreadable.
    """
    _check_name("tool_call_parser", server.tool_call_parser, ToolParserManager.list_registered())
    _check_name("reasoning_parser", server.reasoning_parser, ReasoningParserManager.list_registered())
    if model_path is not None and (server.tool_call_parser is not None or server.reasoning_parser is not None):
        _check_tokenizer(server, model_path)
    if server.chat_template is not None:
        _check_template(server.chat_template)


def set_openai_options(arguments: Namespace, server: ServerConfig) -> None:
    """Set the OpenAI options in the arguments of vLLM's application."""
    arguments.tool_call_parser = server.tool_call_parser
    arguments.enable_auto_tool_choice = server.tool_call_parser is not None
    arguments.structured_outputs_config.reasoning_parser = server.reasoning_parser or ""
    arguments.chat_template = server.chat_template


def _check_name(key: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"server.{key} = {name!r} is not a parser of vLLM. Set it to one of {', '.join(known)}.")


def _check_tokenizer(server: ServerConfig, model_path: Path) -> None:
    tokenizer: Any = get_tokenizer(str(model_path))
    try:
        ParserManager.get_parser(
            server.tool_call_parser, server.reasoning_parser,
            enable_auto_tools=server.tool_call_parser is not None, tokenizer=tokenizer,
        )  # fmt: skip
    except TypeError as error:
        keys = {"tool_call_parser": server.tool_call_parser, "reasoning_parser": server.reasoning_parser}
        given = " and ".join(f"server.{key} = {name!r}" for key, name in keys.items() if name is not None)
        raise ConfigError(
            f"{given} cannot be used with the tokenizer of the model: {error.__cause__ or error}. "
            "Set the parsers that the model was made for, or remove them."
        ) from error


def _check_template(template: str) -> None:
    try:
        text = load_chat_template(template)
    except (VLLMClientError, ValueError, OSError) as error:
        raise ConfigError(
            f"server.chat_template = {template!r} cannot be read: {error}. "
            "Set it to a file that exists, or to the template itself."
        ) from error
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAG.sub("", text or ""))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"server.chat_template = {template!r} is not a Jinja template: line {error.lineno}: {error.message}. "
            "Correct the template."
        ) from error
