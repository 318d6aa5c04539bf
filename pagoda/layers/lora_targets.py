"""The weights that a LoRA adapter may adapt, and their rows in a fused weight."""

from dataclasses import dataclass

from pagoda.layers.module import Module, parameters, walk
from pagoda.layers.parameter import Matrix, Parameter, Table


@dataclass(frozen=True, slots=True, eq=False)
class LoRATarget:
    """A part of a weight, as adapters name it: `model.layers.0.self_attn.q_proj`, for example.

    parameter: the (fused) weight that it is a part of.   rows: of that weight.   inputs: its columns.
    is_embedding: a table, whose outputs (`rows`) are its columns, and whose inputs are its rows: the tokens.
    is_elsewhere: another stage has it.
    """

    parameter: Parameter[object]
    rows: range
    inputs: int
    is_embedding: bool = False
    is_elsewhere: bool = False

    def tensor_rows(self) -> list[int] | None:
        """Return which row of an adapter's tensor, in the checkpoint's order, is each of `rows`; None: they match."""
        declared = self.parameter.declared
        if not isinstance(declared, Matrix) or not any(part.alternates or part.unit_order() for part in declared.parts):
            return None
        found: list[int] = []
        begin = 0
        for number, part in enumerate(declared.parts):
            if begin in self.rows:
                order = part.unit_order() or range(part.unit)
                found += [start + at for start in declared.stored_units(number) for at in order]
            begin += part.rows
        return found

    def share(self) -> "LoRAShare | None":
        """Return what this rank computes of an adapter of the target; None if other ranks compute all of it."""
        if self.is_elsewhere:
            return None
        shard = self.parameter.shard
        if self.is_embedding:
            # The ranks' results are summed, so only one of them adds to what it looked up.
            whole = LoRAShare(0, (range(len(self.rows)),), range(self.inputs), True)
            return whole if shard.rows[0].start == 0 else None
        declared = self.parameter.declared
        assert isinstance(declared, Matrix)
        rows: list[range] = []
        first_row = begin = held = 0
        for part, of_part in zip(declared.parts, shard.rows, strict=True):
            if begin in self.rows:
                first_row = first_row if rows else held
                rows.append(range(begin + of_part.start - self.rows.start, begin + of_part.stop - self.rows.start))
            begin, held = begin + part.rows, held + len(of_part)
        return LoRAShare(first_row, tuple(rows), shard.columns, shard.columns.start == 0)


@dataclass(frozen=True, slots=True)
class LoRAShare:
    """What a rank computes of an adapter of a target.

    first_row: of what the rank holds of the weight.   rows: of the target's outputs.   columns: of its inputs.
    bias: whether the rank adds the adapter's bias.
    """

    first_row: int
    rows: tuple[range, ...]
    columns: range
    bias: bool

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for rows in self.rows)


def lora_targets(root: Module) -> dict[str, LoRATarget]:
    """Return the targets of a model by path. Experts, whose weights are stacked, and encoders are excluded."""
    found: dict[str, LoRATarget] = {}
    here = {parameter for _, parameter in parameters(root)}
    excluded = {
        parameter
        for _, module in walk(root, everywhere=True)
        if not module.takes_adapters
        for _, parameter in parameters(module, everywhere=True)
    }
    for path, parameter in parameters(root, everywhere=True):
        if parameter in excluded:
            continue
        is_elsewhere = parameter not in here
        declared = parameter.declared
        if isinstance(declared, Table):
            layer = path.rpartition(".")[0]
            found[layer] = LoRATarget(parameter, range(declared.columns), declared.rows, True, is_elsewhere)
        if not isinstance(declared, Matrix) or declared.num_experts:
            continue
        first = 0
        for name, part in zip(declared.part_paths(path), declared.parts, strict=True):
            end = first + part.rows
            # Adjacent parts of one name are one tensor in the checkpoint, and one target.
            begin = found[name].rows.start if name in found else first
            found[name] = LoRATarget(parameter, range(begin, end), declared.columns, is_elsewhere=is_elsewhere)
            first = end
    return found
