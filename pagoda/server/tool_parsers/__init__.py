"""Parse tool calls in generated text while it streams.
To add a format, write a subclass of ToolParser, list it here, and give its grammar the same name in
`engine/grammars/tool_grammar.py`.
"""

from pagoda.base.registry import Registry
from pagoda.server.tool_parsers.base import ToolParser
from pagoda.server.tool_parsers.formats import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    GLMParser,
    GraniteParser,
    HermesParser,
    KimiParser,
    LlamaJsonParser,
    Mistral3Parser,
    MistralParser,
    Qwen3CoderParser,
)
from pagoda.server.tool_parsers.pythonic import PythonicParser

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
        "mistral3": Mistral3Parser,
        "kimi": KimiParser,
        "qwen3_coder": Qwen3CoderParser,
        "glm": GLMParser,
    },
)

_NAMES_OF_VLLM = {"llama3_json": "llama_json", "llama4_json": "llama_json", "llama4_pythonic": "pythonic"}
_NAMES_OF_VLLM |= {"kimi_k2": "kimi", "glm45": "glm", "glm47": "glm", "qwen3_xml": "qwen3_coder"}


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
    if DeepSeekV3Parser.SECTION[0] in template:
        return "deepseek_v3" if DeepSeekV3Parser.ARGUMENTS in template.replace("\\n", "\n") else "deepseek_v31"
    for name, parser in (("mistral", MistralParser), ("granite", GraniteParser)):
        if parser.MARKER in template:
            return name
    if "func_name1(params_name1=" in template.replace(" ", ""):  # how Meta's prompts show the format to the model
        return "pythonic"
    if LlamaJsonParser.TAG in template or '"parameters":' in template:
        return "llama_json"
    return None
