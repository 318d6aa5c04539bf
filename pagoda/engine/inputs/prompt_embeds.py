"""Prompts as embeddings: from the arrays and tensors of callers, or from the files that clients send, to float32.

A prompt is given as embeddings whole, or messages of a conversation have them among their parts.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import RequestError
from pagoda.engine.templates.chat_values import map_parts
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


@dataclass(frozen=True, slots=True)
class EmbedsPart:
    """A part of a message that is given as embeddings.

    name: what errors call it.   given: as `read_embeds` takes it.
    """

    name: str
    given: object


def take_embeds(messages: Sequence[Any], mark: Callable[[int], str] = str) -> tuple[Sequence[Any], list[EmbedsPart]]:
    """Return the messages with a text, a mark, in place of each part {"type": "prompt_embeds", "data": ...}, and these.

    data: base64, as HTTP clients send it, or an array or tensor. Looks at none of them.   mark: of each, by number.
    Messages of an unexpected form are left as they are, for others to refuse.
    Raises RequestError for such a part that has no data.
    """
    found: list[EmbedsPart] = []

    def without_embeds(where: str, part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != _PARAM:
            return part
        if (data := part.get("data")) is None:
            raise RequestError(f"{where}: the part has no data; send a tensor as base64: data", where)
        found.append(EmbedsPart(where, data))
        return {"type": "text", "text": mark(len(found) - 1)}

    changed = map_parts(messages, without_embeds)
    return (changed, found) if found else (messages, found)


def check_embeds_are_on(size: int, name: str) -> None:
    """Raise RequestError if no prompt may have embeddings.   size: as InputLimits.embeds_size."""
    if not size:
        raise RequestError(f"{name}: prompt embeddings are off on this engine: set enable_prompt_embeds", name)


def read_embeds(given: object, size: int, name: str = _PARAM) -> np.ndarray:
    """Return the embeddings of a prompt: float32 [n, size], a copy.   size: the model's hidden size.

    given: a numpy array or torch tensor of float32, bfloat16 or float16, [n, size] or [1, n, size], or EncodedEmbeds,
        or a string as its data.   name: what errors call it.
    Raises RequestError that names the input, what is wrong with it and what is accepted.
    """
    if isinstance(given, EncodedEmbeds):
        given, name = given.data, given.name
    if isinstance(given, str):
        given = _decoded(given, name)
    if isinstance(given, np.ndarray):
        array, shape, dtype = given, given.shape, given.dtype.name
    elif isinstance(given, _TorchTensor):
        array, shape, dtype = None, tuple(given.shape), str(given.dtype).removeprefix("torch.")
        if str(given.layout) != "torch.strided":
            raise RequestError(f"{name}: a {given.layout} tensor; send a dense one (tensor.to_dense())", name)
    else:
        raise RequestError(
            f"{name} is {abbreviate(type(given).__name__)}, expected a numpy array or a torch tensor; "
            "over HTTP, a file as base64",
            name,
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


def _decoded(text: str, name: str) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
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
