"""ModelSpec: a model's shapes, for code that does not import torch."""

from dataclasses import dataclass

from pagoda.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a decoder-only model, as read from its checkpoint.

    layer_windows: per layer, 0 for full attention, else the sliding window in tokens.
    max_position: longest sequence the checkpoint supports.   eos_token_ids: any of them ends an output.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    layer_windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tie_embeddings: bool = False
    torch_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if len(self.layer_windows) != self.num_layers:
            raise ConfigError(
                f"{self.architecture}: {self.num_layers} layers but {len(self.layer_windows)} attention windows"
            )
