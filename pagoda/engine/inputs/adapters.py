"""Adapters as callers name them: check their files against the model, and identify them by content."""

import os
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pagoda.base.errors import ConfigError, RequestError
from pagoda.base.lora import LoRARequest
from pagoda.core.request import LoraRef
from pagoda.loading.adapters.config import CONFIG_FILE, is_prompt_adapter
from pagoda.loading.adapters.files import WEIGHTS_FILE, AdapterTargets, check_adapter
from pagoda.loading.adapters.prompt_tuning import read_prompt_adapter

AdapterChoice = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts of a call, or one for each."""

_MOST_REMEMBERED = 1024

_Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptAdapter:
    """A prompt adapter: embeddings to put in front of prompts. The engine sees nothing but these.

    path: its folder.   digest: of its contents.   embeds: float32 [virtual tokens, hidden size].
    """

    name: str
    path: str
    digest: str
    embeds: np.ndarray

    @property
    def identity(self) -> tuple[str, ...]:
        """As LoraRef.identity."""
        return (self.digest,)


Adapter = LoraRef | PromptAdapter
"""What requests may use under a name."""


def adapter_for_each(given: AdapterChoice, count: int) -> Sequence[LoRARequest | None]:
    """Return the adapter of each of `count` prompts. Raises RequestError for another number of them."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise RequestError(
            f"lora_request is {type(given).__name__}, expected LoRARequest or a list of them", "lora_request"
        )
    if len(given) != count:
        raise RequestError(f"{len(given)} lora_requests for {count} prompts", "lora_request")
    return given


class KnownAdapters:
    """Finds adapters. Hashing the files takes long, so it remembers those that it has read and that have not changed.

    Thread-safe.
    """

    def __init__(self, targets: AdapterTargets, max_rank: int, embeds_size: int = 0) -> None:
        """targets: of the model.   max_rank: of an adapter.

        embeds_size: elements of a prompt embedding; 0 if the model takes none, and so no prompt adapters.
        """
        self._targets, self._max_rank, self._embeds_size = targets, max_rank, embeds_size
        self._found: OrderedDict[str, tuple[_Signature, Adapter]] = OrderedDict()  # by folder

    def remembered(self, given: LoRARequest) -> Adapter | None:
        """Return an adapter whose files were read before and have not changed since; else None."""
        folder = os.path.realpath(given.lora_path)
        known = self._found.get(folder)
        if known is None or known[0] != _signature(folder):
            return None
        return replace(known[1], name=given.lora_name)

    def find(self, given: LoRARequest) -> Adapter:
        """Return an adapter after checking its files, if that was not done before.

        Raises RequestError that names the file and what is missing, unsupported or of a wrong shape.
        """
        found = self.remembered(given)
        if found is not None:
            return found
        folder = os.path.realpath(given.lora_path)
        signature = _signature(folder)
        try:
            found = self._read(given.lora_name, folder)
        except ConfigError as error:
            raise RequestError(f"adapter {given.lora_name!r}: {error}", "lora_request") from None
        if signature is not None:
            self._found[folder] = (signature, found)
            if len(self._found) > _MOST_REMEMBERED:
                self._found.popitem(last=False)
        return found

    def _read(self, name: str, folder: str) -> Adapter:
        if is_prompt_adapter(Path(folder)):
            files = read_prompt_adapter(Path(folder), self._embeds_size)
            return PromptAdapter(name, folder, files.digest, files.embeds)
        return LoraRef(name, folder, check_adapter(Path(folder), self._targets, self._max_rank).digest)


def _signature(folder: str) -> _Signature | None:
    """Return what changes when a file of the adapter is replaced or written to; None if one is missing."""
    try:
        found = [os.stat(os.path.join(folder, name)) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except OSError:
        return None
    return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in found)


class AdapterUses:
    """Which adapters unfinished requests use, so that one is unloaded only after the last of them."""

    def __init__(self) -> None:
        self._num_requests: Counter[str] = Counter()  # by digest
        self._unloading: dict[str, LoraRef] = {}

    def begin(self, lora: LoraRef) -> None:
        """A request that uses the adapter begins."""
        self._num_requests[lora.digest] += 1

    def end(self, lora: LoraRef) -> LoraRef | None:
        """A request has ended; return the adapter if it is to be unloaded now."""
        self._num_requests[lora.digest] -= 1
        if self._num_requests[lora.digest]:
            return None
        del self._num_requests[lora.digest]
        return self._unloading.pop(lora.digest, None)

    def unload(self, lora: LoraRef) -> LoraRef | None:
        """The adapter is no longer wanted; return it if no request uses it: it is to be unloaded now."""
        if lora.digest not in self._num_requests:
            return lora
        self._unloading[lora.digest] = lora
        return None

    def keep(self, lora: LoraRef) -> None:
        """The adapter is wanted again."""
        self._unloading.pop(lora.digest, None)
