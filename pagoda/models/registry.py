"""Which architectures there are: one line each."""

from pagoda.base.registry import Registry
from pagoda.models.architecture import Architecture
from pagoda.models.gemma3 import GEMMA3
from pagoda.models.llama import LLAMA
from pagoda.models.mistral import MISTRAL
from pagoda.models.qwen2 import QWEN2
from pagoda.models.qwen3 import QWEN3

ARCHITECTURES: tuple[Architecture, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA3,
)

BY_HF_NAME: Registry[Architecture] = Registry(
    "model architecture", {name: architecture for architecture in ARCHITECTURES for name in architecture.hf_names}
)
BY_GGUF_NAME: Registry[Architecture] = Registry(
    "GGUF architecture",
    {architecture.gguf_name: architecture for architecture in ARCHITECTURES if architecture.gguf_name is not None},
)
