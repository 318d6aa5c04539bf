"""The weights that a LoRA adapter may adapt, and their rows in a fused weight."""

from dataclasses import dataclass

from pagoda.layers.module import Module, parameters
from pagoda.layers.parameter import Matrix, Parameter, Table


@dataclass(frozen=True, slots=True, eq=False)
class LoRATarget:
    """A part of a weight, as adapters name it: `model.layers.0.self_attn.q_proj`, for example.

    parameter: the (fused) weight that it is a part of.   rows: of that weight.   inputs: its columns.
    is_embedding: a table, whose outputs (`rows`) are its columns, and whose inputs are its rows: the tokens.
    """

    parameter: Parameter[object]
    rows: range
    inputs: int
    is_embedding: bool = False


def lora_targets(root: Module) -> dict[str, LoRATarget]:
    """Return the targets of a model by path. Experts are excluded, because their weights are stacked."""
    found: dict[str, LoRATarget] = {}
    for path, parameter in parameters(root):
        declared = parameter.declared
        if isinstance(declared, Table):
            layer = path.rpartition(".")[0]
            found[layer] = LoRATarget(parameter, range(declared.columns), declared.rows, is_embedding=True)
        if not isinstance(declared, Matrix) or declared.num_experts:
            continue
        first = 0
        for name, part in zip(declared.part_paths(path), declared.parts, strict=True):
            end = first + part.rows
            # Adjacent parts of one name are one tensor in the checkpoint, and one target.
            begin = found[name].rows.start if name in found else first
            found[name] = LoRATarget(parameter, range(begin, end), declared.columns)
            first = end
    return found
