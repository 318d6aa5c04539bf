"""Module: a node of a model's tree."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from pagoda.layers.parameter import Matrix, Parameter


class Module:
    """Its attributes that are parameters, modules or lists of modules are its children.

    The path of a child is the path of its parent, a dot and the attribute's name (of a list's items also the index).
    Paths are the names that transformers gives to a checkpoint's tensors; `models/naming.py` maps them to other names.
    A module that several parents share belongs to the first.
    is_elsewhere: it, and what is below it, is computed by another rank: walks leave it out.
    takes_adapters: LoRA adapters may adapt it and what is below it.
    """

    is_elsewhere = False
    takes_adapters = True

    def children(self) -> Iterator[tuple[str, "Module"]]:
        """Child modules by name, in the order in which they were assigned."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list | tuple):
                for index, item in enumerate(cast(Sequence[object], value)):
                    if isinstance(item, Module):
                        yield f"{name}.{index}", item

    def own_parameters(self) -> Iterator[tuple[str, Parameter[object]]]:
        """The parameters that are attributes of this module, by name."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield name, value


def walk(root: Module, everywhere: bool = False) -> Iterator[tuple[str, Module]]:
    """Yield every module of a tree once, parents before children, with its path; the root's is "".

    everywhere: with those that are elsewhere.
    """
    seen: set[int] = set()

    def visit(path: str, module: Module) -> Iterator[tuple[str, Module]]:
        if id(module) in seen or (module.is_elsewhere and not everywhere):
            return
        seen.add(id(module))
        yield path, module
        for name, child in module.children():
            yield from visit(f"{path}.{name}" if path else name, child)

    return visit("", root)


def keep_floats(root: Module) -> None:
    """Leave the matrices of a tree, which is not loaded, out of quantisation."""
    for _, parameter in parameters(root):
        if isinstance(parameter.declared, Matrix):
            parameter.declared = replace(parameter.declared, quantizable=False)


def parameters(root: Module, everywhere: bool = False) -> Iterator[tuple[str, Parameter[object]]]:
    """Yield every parameter of a tree once, with its path.   everywhere: see `walk`."""
    for path, module in walk(root, everywhere):
        for name, parameter in module.own_parameters():
            yield f"{path}.{name}" if path else name, parameter
