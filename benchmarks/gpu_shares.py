"""The shares of a card's measured bandwidth and products that a dense bfloat16 model's throughput takes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Result = dict[str, object]


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What a step reads.   body: weights that every token is multiplied by.   head: weights of the logits.

    kv_per_token: of the KV cache, all layers.
    """

    body: int
    head: int
    kv_per_token: int

    @classmethod
    def of(cls, folder: Path) -> "ModelBytes":
        """Of a checkpoint without experts. A table that is not the head is left out: a step reads a few rows of it."""
        config = json.loads((folder / "config.json").read_text())
        table = 2 * config["vocab_size"] * config["hidden_size"]
        tables = 1 if config["tie_word_embeddings"] else 2
        kv = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        return cls((folder / "model.safetensors").stat().st_size - tables * table, table, kv)


def shares_of_ceilings(
    found: Mapping[str, object],
    work: Sequence[Mapping[str, object]],
    model: ModelBytes,
    ceilings: Mapping[str, object],
    is_decode: bool,
) -> Result:
    """Return `share_of_flops` and, of a workload that decodes all of its requests together, `share_of_bandwidth`.

    Two products per weight and token, prompts included, and for the logits per output token; without attention. Of the
    bandwidth: all weights once per step, and the KV cache of what a token can see.   work: the requests.
    """
    if not ceilings:
        return {}
    lengths = [(len(list(_prompt(request))), int(str(request["max_tokens"]))) for request in work]
    tokens, outputs = sum(map(sum, lengths)), sum(out for _, out in lengths)
    secs = float(str(found["secs"]))
    flops = model.body * tokens + model.head * outputs  # two products per weight, two bytes per weight
    shares: Result = {"share_of_flops": flops / secs / float(str(ceilings["bf16_flops_per_s"]))}
    if is_decode:
        steps = max(out for _, out in lengths)
        seen = sum(prompt * out + out * (out - 1) // 2 for prompt, out in lengths)
        num_bytes = steps * (model.body + model.head) + model.kv_per_token * seen
        shares["share_of_bandwidth"] = num_bytes / secs / float(str(ceilings["copy_bytes_per_s"]))
    return shares


def _prompt(request: Mapping[str, object]) -> Sequence[int]:
    prompt = request["prompt_token_ids"]
    assert isinstance(prompt, list)
    return prompt
