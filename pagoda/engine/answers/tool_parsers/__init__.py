"""Parse tool calls in generated text while it streams.
To add a format, write a subclass of ToolParser, with its grammar if it has one, and list it here.
"""

from pagoda.base.registry import Registry
from pagoda.engine.answers.tool_parsers.base import ToolParser
from pagoda.engine.answers.tool_parsers.formats import (
    ApertusParser,
    CohereParser,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    Gemma4Parser,
    GraniteParser,
    HarmonyParser,
    HermesParser,
    HunyuanParser,
    KimiParser,
    LlamaJsonParser,
    MiniMaxM1Parser,
    Mistral3Parser,
    MistralParser,
    NemotronParser,
)
from pagoda.engine.answers.tool_parsers.pythonic import LFM2Parser, Olmo3Parser, PythonicParser
from pagoda.engine.answers.tool_parsers.tagged import (
    DeepSeekV4Parser,
    DeepSeekV32Parser,
    GLMParser,
    MiniMaxM3Parser,
    MiniMaxParser,
    Qwen3CoderParser,
    SeedParser,
)

TOOL_PARSERS: Registry[type[ToolParser]] = Registry(
    "tool call parser",
    {
        "apertus": ApertusParser,
        "cohere": CohereParser,
        "gemma4": Gemma4Parser,
        "lfm2": LFM2Parser,
        "olmo3": Olmo3Parser,
        "nemotron": NemotronParser,
        "hunyuan": HunyuanParser,
        "seed": SeedParser,
        "minimax": MiniMaxParser,
        "minimax_m1": MiniMaxM1Parser,
        "minimax_m3": MiniMaxM3Parser,
        "deepseek_v32": DeepSeekV32Parser,
        "deepseek_v4": DeepSeekV4Parser,
        "qwen3_coder": Qwen3CoderParser,
        "glm": GLMParser,
        "harmony": HarmonyParser,
        "kimi": KimiParser,
        "mistral3": Mistral3Parser,
        "hermes": HermesParser,
        "deepseek_v3": DeepSeekV3Parser,
        "deepseek_v31": DeepSeekV31Parser,
        "mistral": MistralParser,
        "granite": GraniteParser,
        "pythonic": PythonicParser,
        "llama_json": LlamaJsonParser,
    },
)
"""By name. A chat template uses the first whose marks it has."""
GENERIC_PARSER = "hermes"
"""Reads calls as `with_generic_tools` asks for them."""


def parser_named(name: str) -> str:
    """Return the name in TOOL_PARSERS of a parser, which vLLM may call something else. Raises ConfigError."""
    own = next((own for own in TOOL_PARSERS if name in TOOL_PARSERS[own].VLLMS_NAMES), name)
    TOOL_PARSERS[own]  # raises for an unknown name
    return own


def parser_for_template(template: str | None) -> str | None:
    """Return the parser for the tool call format in a chat template, or None if it has none."""
    return next((name for name in TOOL_PARSERS if template is not None and TOOL_PARSERS[name].is_of(template)), None)
