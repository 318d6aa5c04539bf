"""Parse tool calls in generated text while it streams. One file for each family of formats.

To add one, write a class, list it here, and give its grammar the same name in `engine/grammars/tool_grammar.py`.
"""

from pagoda.base.registry import Registry
from pagoda.server.tool_parsers.base import Parsed, ToolCall, ToolParser, held_back
from pagoda.server.tool_parsers.json_formats import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    GraniteParser,
    HermesParser,
    LlamaJsonParser,
    MistralParser,
)
from pagoda.server.tool_parsers.pythonic import PythonicParser

__all__ = ["TOOL_PARSERS", "Parsed", "ToolCall", "ToolParser", "held_back", "parser_for_template", "parser_named"]

TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool call parser",
    {
        "hermes": HermesParser,
        "llama_json": LlamaJsonParser,
        "pythonic": PythonicParser,
        "mistral": MistralParser,
        "granite": GraniteParser,
        "deepseek_v3": DeepSeekV3Parser,
        "deepseek_v31": DeepSeekV31Parser,
    },
)

_NAMES_OF_VLLM = {"llama3_json": "llama_json", "llama4_json": "llama_json", "llama4_pythonic": "pythonic"}


def parser_named(name: str) -> str:
    """Return the name in TOOL_PARSERS of a parser, which vLLM may call something else. Raises ConfigError."""
    own = _NAMES_OF_VLLM.get(name, name)
    TOOL_PARSERS[own]  # raises for an unknown name
    return own


def parser_for_template(template: str | None) -> str | None:
    """Return the parser for the tool call format in a chat template, or None if it has none."""
    if template is None:
        return None
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
