"""Which architectures there are: one line each."""

from pagoda.base.registry import Registry
from pagoda.models.apertus import APERTUS
from pagoda.models.arcee import ARCEE
from pagoda.models.architecture import Architecture
from pagoda.models.bamba import BAMBA
from pagoda.models.bart import BART
from pagoda.models.bert import BERT, ROBERTA
from pagoda.models.cohere import COHERE, COHERE2
from pagoda.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from pagoda.models.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from pagoda.models.exaone4 import EXAONE4
from pagoda.models.falcon_h1 import FALCON_H1
from pagoda.models.gemma2 import GEMMA2
from pagoda.models.gemma3 import GEMMA3
from pagoda.models.gemma4 import GEMMA4
from pagoda.models.glm4 import GLM4, GLM4_MOE
from pagoda.models.gpt2 import GPT2
from pagoda.models.gpt_neox import GPT_NEOX
from pagoda.models.gpt_oss import GPT_OSS
from pagoda.models.granite import GRANITE, GRANITEMOE
from pagoda.models.granite4 import GRANITE4
from pagoda.models.hunyuan import HUNYUAN
from pagoda.models.idefics3 import IDEFICS3
from pagoda.models.lfm2 import LFM2, LFM2_MOE
from pagoda.models.llama import LLAMA
from pagoda.models.llama4 import LLAMA4
from pagoda.models.mamba2 import MAMBA2
from pagoda.models.minimax_m2 import MINIMAX_M2
from pagoda.models.mistral import MISTRAL, MISTRAL3, MIXTRAL
from pagoda.models.mistral4 import MISTRAL4
from pagoda.models.modernbert import MODERNBERT
from pagoda.models.nanochat import NANOCHAT
from pagoda.models.nemotron_h import NEMOTRON_H
from pagoda.models.olmo2 import OLMO2, OLMO3
from pagoda.models.olmoe import OLMOE
from pagoda.models.phi import PHI, PHI3
from pagoda.models.pooled_decoder import pooled_variants
from pagoda.models.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from pagoda.models.qwen2_5_vl import QWEN2_5_VL
from pagoda.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from pagoda.models.qwen3_next import QWEN3_NEXT
from pagoda.models.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from pagoda.models.seed_oss import SEED_OSS
from pagoda.models.smollm3 import SMOLLM3
from pagoda.models.stablelm import STABLELM
from pagoda.models.starcoder2 import STARCODER2
from pagoda.models.t5 import MT5, T5
from pagoda.models.whisper import WHISPER

FAMILIES: dict[str, tuple[Architecture, ...]] = {
    "text": (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA2,
        GEMMA3,
        GEMMA4,
        OLMO2,
        OLMO3,
        SMOLLM3,
        EXAONE4,
        GRANITE,
        GRANITEMOE,
        QWEN2_MOE,
        GLM4,
        GLM4_MOE,
        GPT_OSS,
        MISTRAL3,
        MISTRAL4,
        MIXTRAL,
        QWEN3_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        OLMOE,
        GPT2,
        GPT_NEOX,
        PHI,
        PHI3,
        STARCODER2,
        STABLELM,
        COHERE,
        COHERE2,
        LFM2,
        LFM2_MOE,
        MAMBA2,
        GRANITE4,
        BAMBA,
        FALCON_H1,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        NEMOTRON_H,
        SEED_OSS,
        ARCEE,
        APERTUS,
        ERNIE4_5,
        ERNIE4_5_MOE,
        HUNYUAN,
        MINIMAX_M2,
        NANOCHAT,
        LLAMA4,
    ),
    "text and images": (IDEFICS3, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, QWEN3_5, QWEN3_5_MOE, GEMMA3, MISTRAL3),
    "embeddings": (BERT, ROBERTA, MODERNBERT),
    "encoder and decoder": (WHISPER, BART, T5, MT5),
}
"""By what they read and give. A decoder's checkpoint with another head embeds, ranks or classifies."""

ARCHITECTURES: tuple[Architecture, ...] = tuple(
    {architecture.name: architecture for kind in FAMILIES.values() for architecture in kind}.values()
)

BY_HF_NAME: Registry[Architecture] = Registry(
    "model architecture",
    {
        **{name: variant for decoder in ARCHITECTURES for name, variant in pooled_variants(decoder).items()},
        **{name: architecture for architecture in ARCHITECTURES for name in architecture.hf_names},
    },
)
BY_GGUF_NAME: Registry[tuple[Architecture, ...]] = Registry(
    "GGUF architecture",
    {
        name: tuple(architecture for architecture in ARCHITECTURES if name in architecture.gguf_names)
        for name in (name for architecture in ARCHITECTURES for name in architecture.gguf_names)
    },
)
"""One name may stand for a model without experts and for one with them. Of several, a file is read as the first."""
