"""choose_naming: find the names that a checkpoint gives to a model's tensors. No torch."""

from collections.abc import Container

from pagoda.base.errors import ConfigError
from pagoda.layers.module import parameters
from pagoda.layers.parameter import Declaration, Table, Vector
from pagoda.loading.model_files import ModelFiles
from pagoda.models.architecture import Architecture
from pagoda.models.base import Model
from pagoda.models.naming import Naming


def choose_naming(architecture: Architecture, files: ModelFiles, names: Container[str], model: Model) -> Naming:
    """Return the first naming whose tables and vectors all exist, else the first whose embedding exists.

    names: of the checkpoint's tensors. Raises ConfigError if none fits.
    """
    if files.format == "gguf":
        return architecture.gguf
    paths = [path for path, parameter in parameters(model) if _is_named(parameter.declared)]
    for naming in architecture.hf:
        if all(naming.find(path).name in names for path in paths):
            return naming
    embeddings = [naming.find(paths[0]).name for naming in architecture.hf]
    for naming, embedding in zip(architecture.hf, embeddings, strict=True):
        if embedding in names:
            return naming
    raise ConfigError(
        f"{files.path}: no {architecture.name} weights: none of these tensors exists: {', '.join(embeddings)}"
    )


def _is_named(declared: Declaration) -> bool:
    """Whether the checkpoint has one tensor for the parameter, named as its path."""
    return isinstance(declared, Table) or (isinstance(declared, Vector) and not declared.zeros)
