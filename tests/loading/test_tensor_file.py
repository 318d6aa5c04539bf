"""Files with a tensor, from clients that may be hostile."""

import base64
import contextlib
import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from pagoda.base.errors import RequestError
from pagoda.engine.inputs.prompt_embeds import EncodedEmbeds, read_embeds
from pagoda.loading.tensor_file import TensorFileError, read_tensor


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def torch_file(pickled: bytes, data: bytes = bytes(64), method: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """An archive with this in place of its pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", data)
        for name, content in more.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


PICKLE = zipfile.ZipFile(io.BytesIO(saved(torch.zeros(4, 4)))).read("archive/data.pkl")
HUGE_PICKLE = PICKLE.replace(b"K\x04K\x04\x86", b"J\xff\xff\xff\x7fK\x04\x86", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("write", [saved, lambda tensor: save({"any name": tensor.contiguous()}, {"made": "here"})])
def test_tensors_are_read_exactly(dtype: torch.dtype, write: Callable[[torch.Tensor], bytes]) -> None:
    whole = draw(9, 5, dtype=dtype)
    for tensor in (whole, whole[2:7], whole[:, None], whole[:1], draw(2, 3, 4, 5, dtype=dtype), whole[:0]):
        for form in (tensor, torch.nn.Parameter(tensor)) if write is saved else (tensor,):
            found = read_tensor(write(form))
            assert found.shape == tuple(tensor.shape)
            assert np.array_equal(found.astype(np.float32), tensor.float().numpy())


class Evil:
    """Calls something when it is unpickled."""

    called = False

    def __reduce__(self) -> Any:
        return (setattr, (Evil, "called", True))


HUGE = 2**40
ENTRY = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}

HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "neither"),
    "text": (b"hello world, this is no tensor", "neither"),
    "pickle without archive": (pickle.dumps(Evil()), "neither"),
    "a call": (torch_file(pickle.dumps(Evil(), 2)), "calls|which no tensor needs"),
    "a call in a tensor": (saved([draw(2, 2), Evil()]), "which no tensor needs"),
    "sparse": (saved(draw(4, 4).to_sparse()), "to_dense"),
    "integers": (saved(torch.zeros(4, 4, dtype=torch.int64)), "elements of another type"),
    "double": (saved(torch.zeros(4, 4, dtype=torch.float64)), "elements of another type"),
    "several": (saved({"a": draw(2, 2)}), "which no tensor needs"),
    "transposed": (saved(draw(4, 3).t()), "contiguous"),
    "one row many times": (saved(draw(1, 4).expand(1000, 4)), "contiguous"),
    "no pickle": (torch_file(b""), "pickle of a tensor"),
    "half a pickle": (torch_file(PICKLE[:40]), "pickle of a tensor"),
    "a long pickle": (torch_file(b"\x80\x02" + b"N" * 10_000 + b"."), "oversized"),
    "a memo of four billion": (torch_file(b"\x80\x02Nr\xff\xff\xff\xff."), "LONG_BINPUT, which no tensor"),
    "an empty stack": (torch_file(b"\x80\x02\x87."), "pickle of a tensor"),
    "no mark": (torch_file(b"\x80\x02NNt."), "pickle of a tensor"),
    "an unknown memo": (torch_file(b"\x80\x02h\x07."), "pickle of a tensor"),
    "another function of a known module": (
        torch_file(PICKLE.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3")),
        "calls",
    ),
    "a storage that is called": (torch_file(b"\x80\x02ctorch\nFloatStorage\n)R."), "pickle of a tensor"),
    "a storage of another name": (
        torch_file(PICKLE.replace(b"ctorch\nFloatStorage\n", b"X\4\0\0\0evil")),
        "another object",
    ),
    "a state": (torch_file(b"\x80\x02ccollections\nOrderedDict\n)b."), "BUILD, which no tensor"),
    "a new object": (torch_file(b"\x80\x02ccollections\nOrderedDict\n)\x81."), "NEWOBJ, which no tensor"),
    "a name on the stack": (torch_file(b"\x80\x04X\2\0\0\0osX\6\0\0\0system\x93."), "STACK_GLOBAL, which no tensor"),
    "too few arguments": (torch_file(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R."), "another object"),
    "a huge shape": (torch_file(HUGE_PICKLE), "truncated: its tensor"),
    "too few elements": (torch_file(PICKLE, bytes(60)), "truncated: its tensor"),
    "no end": (torch_file(PICKLE)[:-200], "truncated or corrupt"),
    "compressed": (torch_file(PICKLE, bytes(64), zipfile.ZIP_DEFLATED), "compresses nothing"),
    "a zip bomb": (torch_file(PICKLE, bytes(100 << 20), zipfile.ZIP_DEFLATED), "compresses nothing"),
    "big endian": (torch_file(PICKLE, byteorder=b"big"), "byte order"),
    "half an archive": (saved(draw(8, 8))[:300], "truncated or corrupt"),
    "safetensors: a header beyond the file": (struct.pack("<Q", HUGE) + b"{}", "neither"),
    "safetensors: a long header": (safetensors(b" " * 100_000), "header of 100000 bytes"),
    "safetensors: no JSON": (safetensors(b"{"), "neither"),
    "safetensors: deep": (safetensors(b"[" * 60_000), "neither"),
    "safetensors: a list": (safetensors([1]), "neither"),
    "safetensors: no tensor": (safetensors({"__metadata__": {}}), "0 tensors"),
    "safetensors: two": (save({"a": draw(2, 2), "b": draw(2, 2)}), "2 tensors"),
    "safetensors: a huge shape": (safetensors({"a": {**ENTRY, "shape": [HUGE, HUGE]}}, bytes(64)), "neither.*whole"),
    "safetensors: too many dimensions": (safetensors({"a": {**ENTRY, "shape": [1] * 99}}, bytes(64)), "neither.*whole"),
    "safetensors: negative": (safetensors({"a": {**ENTRY, "shape": [-4, -4]}}, bytes(64)), "neither.*whole"),
    "safetensors: fractions": (safetensors({"a": {**ENTRY, "shape": [4.0, 4]}}, bytes(64)), "neither.*whole"),
    "safetensors: beyond its end": (safetensors({"a": ENTRY}, bytes(60)), "neither.*whole"),
    "safetensors: backwards": (safetensors({"a": {**ENTRY, "data_offsets": [64, 0]}}, bytes(64)), "neither.*whole"),
    "safetensors: integers": (safetensors({"a": {**ENTRY, "dtype": "I32"}}, bytes(64)), "another type"),
    **{
        f"safetensors: an empty array beyond numpy, {shape}": (
            safetensors({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}),
            "a shape that no tensor has",
        )
        for shape in ([0, 2**47, 2**47], [0, 2**63], [0] * 99)
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_bounded_memory(name: str) -> None:
    data, message = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises(TensorFileError, match=message):
            read_tensor(data)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + 2**20
    finally:
        tracemalloc.stop()
    assert not Evil.called


def test_bytes_cut_and_changed_anywhere_give_a_tensor_or_the_error() -> None:
    rng = np.random.default_rng(1)
    for whole in (saved(draw(3, 4)), save({"a": draw(3, 4)})):
        for number in range(400):
            data = bytearray(whole[: int(rng.integers(len(whole)))] if number % 4 == 0 else whole)
            for at in rng.integers(0, max(len(data), 1), int(rng.integers(0, 4))):
                if len(data):
                    data[at] = int(rng.integers(256))
            with contextlib.suppress(TensorFileError):
                assert isinstance(read_tensor(bytes(data)), np.ndarray)


def test_base64_of_a_file() -> None:
    given = draw(3, 8)
    text = base64.b64encode(saved(given)).decode()
    assert np.array_equal(read_embeds(EncodedEmbeds(text), 8), given.numpy())
    for data in ("not base64!", "AAA", "Ünicode"):
        with pytest.raises(RequestError, match=r"prompt_embeds\[2\]: not valid base64") as caught:
            read_embeds(EncodedEmbeds(data, "prompt_embeds[2]"), 8)
        assert caught.value.param == "prompt_embeds[2]"
    with pytest.raises(RequestError, match=r"prompt_embeds: the shape is \(3, 8\), expected \(number of tokens, 9\)"):
        read_embeds(EncodedEmbeds(text), 9)
