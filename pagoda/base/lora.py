"""LoRA adapters as users set them up and name them, with vLLM's names."""

from dataclasses import dataclass
from typing import Annotated

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.setting import Setting
from pagoda.base.text import is_encodable


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """LoRA adapters that requests may use."""

    enable_lora: Annotated[bool, Setting("Serve LoRA adapters of the model, chosen per request.", flat=True)] = False
    max_loras: Annotated[
        int | None,
        Setting(
            "Maximum different adapters in one step.",
            unset="4, or max_cpu_loras if that is less",
            at_least=1,
            flat=True,
        ),
    ] = None
    max_cpu_loras: Annotated[
        int | None,
        Setting(
            "Adapters kept in memory; the least recently used one makes room for another.",
            unset="max_loras",
            at_least=1,
            flat=True,
        ),
    ] = None
    max_lora_rank: Annotated[
        int, Setting("Maximum rank of an adapter; memory is reserved for it.", at_least=1, flat=True)
    ] = 16

    @property
    def num_per_step(self) -> int:
        """How many different adapters one step may use."""
        return min(4, self.max_cpu_loras or 4) if self.max_loras is None else self.max_loras

    @property
    def num_kept(self) -> int:
        """How many adapters are kept in memory."""
        return self.num_per_step if self.max_cpu_loras is None else self.max_cpu_loras

    def check(self) -> None:
        """Raise ConfigError for fields that contradict each other."""
        if self.num_kept < self.num_per_step:
            raise ConfigError(
                f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}: the adapters of one step "
                "must be in memory at once; raise the first or lower the second"
            )


@dataclass(frozen=True, slots=True)
class LoRASources:
    """Where a server's adapters come from."""

    lora_modules: Annotated[
        tuple[str, ...],
        Setting(
            'Adapter to serve from the start, as NAME=PATH or JSON: {"name": ..., "path": ...}.',
            unset="none",
            flat=True,
        ),
    ] = ()
    lora_dir: Annotated[
        str | None,
        Setting(
            "Folder whose adapters may be loaded by /v1/load_lora_adapter.",
            unset="adapters cannot be loaded while serving",
            flat=True,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a request, as in vLLM.

    lora_name: for messages.   lora_int_id: positive, for `add_lora` and `remove_lora`.
    lora_path: a folder as PEFT's `save_pretrained` writes it.
    What identifies an adapter is the content of its files: names and numbers may be used again for another one.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or not value.isprintable() or not is_encodable(value):
                raise RequestError(f"{name} must be a string of printable characters (got {abbreviate(value)})", name)
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RequestError(f"lora_int_id must be at least 1 (got {abbreviate(number)})", "lora_int_id")
