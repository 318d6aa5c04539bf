"""Names that people know from Ollama and llama.cpp, and what they are here: a model of the catalog or a hub id.

A name means what Ollama means by it, as a GGUF file that an architecture of `pagoda.models` reads. Sizes are of the
files to fetch, in megabytes.
"""

import difflib
import re
from dataclasses import dataclass

from pagoda.loading.catalog import CATALOG

_HUBS = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/", re.IGNORECASE)
"""What Ollama puts in front of a hub id."""
_LATEST = ":latest"
_MOST_PROPOSED = 3
_LONGEST = 100  # characters that are compared


@dataclass(frozen=True, slots=True)
class KnownName:
    """What a name stands for.   model: of the catalog, or ORG/NAME:QUANTIZATION.   num_bytes: of its files."""

    model: str
    num_bytes: int


# names, model, megabytes. The first name is the full one.
_TABLE: tuple[tuple[tuple[str, ...], str, int], ...] = (
    (("all-minilm:22m", "all-minilm"), "minilm-l6", 91),
    (("smollm2:135m",), "smollm2-135m", 98),
    (("smollm2:360m",), "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0", 386),
    (("smollm2:1.7b", "smollm2"), "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M", 1056),
    (("llama3.2:1b",), "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", 808),
    (("llama3.2:3b", "llama3.2"), "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", 2019),
    (("llama3.1:8b", "llama3.1"), "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M", 4921),
    (("qwen3:0.6b",), "Qwen/Qwen3-0.6B-GGUF:Q8_0", 639),
    (("qwen3:1.7b",), "Qwen/Qwen3-1.7B-GGUF:Q8_0", 1834),
    (("qwen3:4b",), "Qwen/Qwen3-4B-GGUF:Q4_K_M", 2497),
    (("qwen3:8b", "qwen3"), "Qwen/Qwen3-8B-GGUF:Q4_K_M", 5028),
    (("qwen3:14b",), "Qwen/Qwen3-14B-GGUF:Q4_K_M", 9002),
    (("qwen3:30b",), "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", 18557),
    (("qwen3:32b",), "Qwen/Qwen3-32B-GGUF:Q4_K_M", 19762),
    (("qwen2.5:0.5b",), "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", 491),
    (("qwen2.5:1.5b",), "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M", 1117),
    (("qwen2.5:3b",), "Qwen/Qwen2.5-3B-Instruct-GGUF:Q4_K_M", 2105),
    (("qwen2.5:7b", "qwen2.5"), "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M", 4683),
    (("qwen2.5-coder:1.5b",), "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", 1117),
    (("qwen2.5-coder:7b", "qwen2.5-coder"), "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", 4683),
    (("gemma3:270m",), "ggml-org/gemma-3-270m-it-GGUF:Q8_0", 292),
    (("gemma3:1b",), "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", 806),
    (("gemma3:4b", "gemma3"), "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", 2490),
    (("gemma2:2b",), "bartowski/gemma-2-2b-it-GGUF:Q4_K_M", 1709),
    (("mistral:7b", "mistral"), "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M", 4373),
    (("deepseek-r1:1.5b",), "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF:Q4_K_M", 1117),
    (("deepseek-r1:7b",), "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF:Q4_K_M", 4683),
    (("gpt-oss:20b", "gpt-oss"), "ggml-org/gpt-oss-20b-GGUF:MXFP4", 12110),
)

KNOWN_NAMES = {name: KnownName(model, size * 10**6) for names, model, size in _TABLE for name in names}


def full_name(text: str) -> str:
    """Return the catalog's name or the hub id that a name stands for; another text as it is, without hf.co/."""
    if text in CATALOG:
        return text
    text = _HUBS.sub("", text, count=1)
    known = KNOWN_NAMES.get(_key(text))
    return known.model if known else text


def known_size(text: str) -> int:
    """Return the bytes to fetch for a model of the catalog or a known name; 0 of another."""
    if text in CATALOG:
        return CATALOG[text].num_bytes
    known = KNOWN_NAMES.get(_key(text))
    return known.num_bytes if known else 0


def _key(text: str) -> str:
    return text.lower().removesuffix(_LATEST)


def proposals(name: str) -> str:
    """Return "; did you mean 'x' or 'y'?" for a name that is not known, or where the known ones are listed."""
    names = [*CATALOG, *KNOWN_NAMES]
    close = difflib.get_close_matches(name[:_LONGEST].lower(), names, n=_MOST_PROPOSED)
    if not close:
        return "; `pagoda list` has names"
    first, _, last = ", ".join(map(repr, close)).rpartition(", ")
    return f"; did you mean {first} or {last}?" if first else f"; did you mean {last}?"
