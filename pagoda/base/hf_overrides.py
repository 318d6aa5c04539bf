"""HFOverrides: what can be said of a model that pools without editing its files, with vLLM's names."""

from dataclasses import dataclass
from typing import Annotated

from pagoda.base.setting import Setting

TWO_WAY, PLAIN = "from_2_way_softmax", "no_post_processing"


@dataclass(frozen=True, slots=True)
class HFOverrides:
    """Replace what a model's files say.

    All but pooling_type and those of Matryoshka embeddings are settings with which a decoder becomes a reranker.
    """

    pooling_type: Annotated[
        str,
        Setting(
            "Hidden states that embeddings are made of; auto: as the model's files say, or else the last token's.",
            words=("auto", "cls", "last", "mean"),
            flat=True,
        ),
    ] = "auto"

    architectures: Annotated[
        tuple[str, ...], Setting("Class of the model, for example Qwen3ForSequenceClassification.", unset="the file's")
    ] = ()
    classifier_from_token: Annotated[
        tuple[str, ...],
        Setting("Tokens whose rows of the output head become the classification head.", unset="the file's"),
    ] = ()
    method: Annotated[
        str | None,
        Setting(
            "from_2_way_softmax: the probability of the second of two tokens; no_post_processing: an output per token.",
            unset="no_post_processing",
            words=(TWO_WAY, PLAIN),
        ),
    ] = None
    is_original_qwen3_reranker: Annotated[
        bool, Setting("The model is a Qwen3-Reranker: from_2_way_softmax, and pairs in its template.")
    ] = False

    is_matryoshka: Annotated[bool, Setting("Embeddings may be shortened to any number of `dimensions`.")] = False

    matryoshka_dimensions: Annotated[
        tuple[str, ...], Setting("Length that embeddings may be shortened to by `dimensions`.", unset="the file's")
    ] = ()

    def changed(self) -> dict[str, object]:
        """Return what is set, as config.json would have it."""
        found: dict[str, object] = {
            "architectures": list(self.architectures),
            "classifier_from_token": list(self.classifier_from_token),
            "method": self.method,
            "is_original_qwen3_reranker": self.is_original_qwen3_reranker,
        }
        return {name: value for name, value in found.items() if value}
