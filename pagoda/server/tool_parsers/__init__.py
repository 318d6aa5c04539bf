"""Parse tool calls in generated text while it streams. One file for each family of formats.

To add one, write a class, list it here, and give its grammar the same name in `engine/grammars/tool_grammar.py`.
"""

from typing import Any

from pagoda.base.registry import Registry
from pagoda.server.tool_parsers.base import Parsed, ToolCall, ToolParser, held_back, whole_calls
from pagoda.server.tool_parsers.json_formats import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    GraniteParser,
    HermesParser,
    LlamaJsonParser,
    MistralParser,
)
from pagoda.server.tool_parsers.pythonic import PythonicParser
from pagoda.server.tool_parsers.tagged_formats import GLMParser, KimiParser, Mistral3Parser, Qwen3CoderParser, Schemas

__all__ = [
    "TOOL_PARSERS",
    "Parsed",
    "ToolCall",
    "ToolParser",
    "held_back",
    "keeps_special_tokens",
    "make_parser",
    "parser_for_template",
    "parser_named",
    "whole_calls",
]

TOOL_PARSERS: Registry[Any] = Registry(
    "tool call parser",
    {
        "hermes": HermesParser,
        "llama_json": LlamaJsonParser,
        "pythonic": PythonicParser,
        "mistral": MistralParser,
        "granite": GraniteParser,
        "deepseek_v3": DeepSeekV3Parser,
        "deepseek_v31": DeepSeekV31Parser,
        "mistral3": Mistral3Parser,
        "kimi": KimiParser,
        "qwen3_coder": Qwen3CoderParser,
        "glm": GLMParser,
    },
)

_NAMES_OF_VLLM = {"llama3_json": "llama_json", "llama4_json": "llama_json", "llama4_pythonic": "pythonic"}
_NAMES_OF_VLLM |= {"kimi_k2": "kimi", "glm45": "glm", "glm47": "glm", "qwen3_xml": "qwen3_coder"}


def make_parser(name: str, schemas: Schemas) -> ToolParser:
    """Return a new parser.   schemas: of the arguments, for formats that do not say of which type a value is."""
    kind: Any = TOOL_PARSERS[name]
    return kind(schemas) if kind in (Qwen3CoderParser, GLMParser) else kind()


def keeps_special_tokens(name: str | None) -> bool:
    """Return whether a parser reads the text of special tokens."""
    return name in ("kimi", "mistral3")


def parser_named(name: str) -> str:
    """Return the name in TOOL_PARSERS of a parser, which vLLM may call something else. Raises ConfigError."""
    own = _NAMES_OF_VLLM.get(name, name)
    TOOL_PARSERS[own]  # raises for an unknown name
    return own


def parser_for_template(template: str | None) -> str | None:
    """Return the parser for the tool call format in a chat template, or None if it has none."""
    if template is None:
        return None
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<arg_key>" in template:
        return "glm"
    if KimiParser.OPEN in template:
        return "kimi"
    if Mistral3Parser.ARGUMENTS in template and Mistral3Parser.OPEN in template:
        return "mistral3"
    if HermesParser.OPEN in template:
        return "hermes"
    if DeepSeekV3Parser.OPEN in template:
        return "deepseek_v3" if DeepSeekV3Parser.FENCE in template.replace("\\n", "\n") else "deepseek_v31"
    for name, parser in (("mistral", MistralParser), ("granite", GraniteParser)):
        if parser.MARKER in template:
            return name
    if "func_name1(params_name1=" in template.replace(" ", ""):  # how Meta's prompts show the format to the model
        return "pythonic"
    if LlamaJsonParser.TAG in template or '"parameters":' in template:
        return "llama_json"
    return None
