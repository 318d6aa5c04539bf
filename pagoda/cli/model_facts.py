"""What a model is and needs, read from its files without loading it, or from the catalog: for `list` and `show`."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pagoda.base.config import EngineConfig
from pagoda.loading.catalog import CATALOG
from pagoda.loading.known_names import full_name

if TYPE_CHECKING:
    from pagoda.assembly.engine_setup import EngineSetup
    from pagoda.loading.model_files import ModelFiles


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model is.

    kind: "chat", "base" (a text model without a chat template), "embeddings", "labels" or "speech".
    reads: "text", "text and images" or "sound".
    num_bytes: of its weights on disk.   memory_bytes: of the weights as they are held, and the KV cache of one request
        of up to 8,192 tokens; with what its encoder needs for one image or sound.
    context: the longest prompt and output, in tokens.
    """

    kind: str
    reads: str
    architecture: str
    num_parameters: int
    num_bytes: int
    memory_bytes: int
    context: int


def facts_of(config: EngineConfig) -> ModelFacts:
    """Return the facts of a model that is on this machine, or of one of the catalog. Fetches nothing.

    Raises ConfigError for a model that is not there, or that is not supported.
    """
    from pagoda.loading.outline import outline
    from pagoda.loading.resolve import require_cached, settings_without_weights

    name = full_name(config.model.model)
    described = settings_without_weights(config.model)
    if described is None or name not in CATALOG:
        require_cached(config.model)
        return _read(config, None)
    known = CATALOG[name]
    with TemporaryDirectory() as folder:
        files = outline(described, name, Path(folder), known.num_bytes if known.is_gguf else 0)
        return replace(_read(config, files), kind=known.kind, num_bytes=known.num_bytes)


def _read(config: EngineConfig, files: "ModelFiles | None") -> ModelFacts:
    from pagoda.assembly.engine_setup import resolve_engine
    from pagoda.assembly.sizing import encoder_in_memory
    from pagoda.cli.layouts import whole_layout
    from pagoda.loading.model_config import summarize_weights

    setup = resolve_engine(config, files)
    weights, layout = summarize_weights(setup.files), whole_layout(setup)
    return ModelFacts(
        kind=kind_of(setup),
        reads=_reads(setup),
        architecture=setup.spec.architecture,
        num_parameters=weights.num_parameters,
        num_bytes=weights.num_bytes,
        memory_bytes=layout.weights + layout.kv_bytes + encoder_in_memory(setup).scratch,
        context=setup.max_model_len,
    )


def kind_of(setup: "EngineSetup") -> str:
    """Return the kind of a model (see ModelFacts)."""
    from pagoda.engine.tokenizers.load_tokenizer import has_chat_template

    if not setup.tasks.generates:
        return "labels" if setup.tasks.plan.labels else "embeddings"
    if _hears(setup):
        return "speech"
    return "chat" if has_chat_template(setup.files, setup.config.model.tokenizer) else "base"


def _reads(setup: "EngineSetup") -> str:
    if _hears(setup):
        return "sound"
    return "text and images" if setup.encoder is not None and not setup.crosses else "text"


def _hears(setup: "EngineSetup") -> bool:
    return setup.crosses and setup.encoder is not None and not setup.encoder.reads_text
