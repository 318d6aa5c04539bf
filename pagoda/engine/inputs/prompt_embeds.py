"""Prompts as embeddings: from the arrays and tensors of callers, or from the files that clients send, to float32."""

import base64
import binascii
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import RequestError
from pagoda.loading.tensor_file import TensorFileError, read_tensor

_PARAM = "prompt_embeds"
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class EncodedEmbeds:
    """Embeddings as HTTP clients send them: a safetensors file, or what torch.save writes, as base64.

    name: what errors call them.
    """

    data: str
    name: str = _PARAM


@runtime_checkable
class _TorchTensor(Protocol):
    """What is needed of a torch.Tensor; this module does not import torch."""

    dtype: Any
    layout: Any
    shape: Any

    def detach(self) -> Any: ...
    def cpu(self) -> Any: ...


def read_embeds(given: object, size: int) -> np.ndarray:
    """Return the embeddings of a prompt: float32 [n, size], a copy.   size: the model's hidden size.

    given: a numpy array or torch tensor of float32, bfloat16 or float16, [n, size] or [1, n, size], or EncodedEmbeds.
    Raises RequestError that names the input, what is wrong with it and what is accepted.
    """
    name = _PARAM
    if isinstance(given, EncodedEmbeds):
        name = given.name
        given = _decoded(given)
    if isinstance(given, np.ndarray):
        array, shape, dtype = given, given.shape, given.dtype.name
    elif isinstance(given, _TorchTensor):
        array, shape, dtype = None, tuple(given.shape), str(given.dtype).removeprefix("torch.")
        if str(given.layout) != "torch.strided":
            raise RequestError(f"{name}: a {given.layout} tensor; send a dense one (tensor.to_dense())", name)
    else:
        raise RequestError(
            f"{name} is {abbreviate(type(given).__name__)}, expected a numpy array or a torch tensor", name
        )
    _check(shape, dtype, size, name)
    if array is None:
        array = _array_of(given, name)
    # A copy, because the caller's array may change while the request waits.
    embeds = np.array(array, np.float32, order="C").reshape(-1, size)
    if not np.isfinite(embeds).all():
        row = int(np.flatnonzero(~np.isfinite(embeds).all(axis=1))[0])
        raise RequestError(f"{name}: embedding {row} has values that are not finite (NaN or infinite)", name)
    return embeds


def _decoded(given: EncodedEmbeds) -> np.ndarray:
    name = given.name
    try:
        data = base64.b64decode(given.data, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            f"{name}: not valid base64; send a safetensors file, or what torch.save writes, as base64", name
        ) from None
    try:
        return read_tensor(data)
    except TensorFileError as error:
        raise RequestError(f"{name}: {error}", name) from None


def _check(shape: tuple[int, ...], dtype: str, size: int, name: str) -> None:
    if dtype not in _DTYPES:
        raise RequestError(f"{name}: elements are {abbreviate(dtype)}; convert them to {', '.join(_DTYPES)}", name)
    rows = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if len(rows) != 2 or rows[1] != size:
        raise RequestError(
            f"{name}: the shape is {abbreviate(tuple(shape))}, expected (number of tokens, {size}): one prompt, "
            "with the hidden size of this model",
            name,
        )
    if not rows[0]:
        raise RequestError(f"{name}: the prompt is empty: it needs at least one embedding", name)


def _array_of(tensor: Any, name: str) -> np.ndarray:
    """Return a torch tensor's elements in float32."""
    try:
        return tensor.detach().cpu().float().numpy()  # type: ignore[no-any-return]
    except (RuntimeError, NotImplementedError, TypeError) as error:  # a meta tensor, say
        raise RequestError(f"{name}: the tensor has no elements that can be read: {error}", name) from None
