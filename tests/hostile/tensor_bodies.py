"""Hostile prompt embeddings: tensors that do not fit, and files that are damaged, claim too much or call something."""

import base64
import io
import json
import math
import pickle
import random
import struct
import zipfile
from typing import Any

from tests.hostile.bodies import TEXT, Body
from tests.hostile.json_text import write
from tests.hostile.values import HOSTILE

HIDDEN = 576  # of the model under attack

_DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1, "nothing": 1}
_EPOCH = (1980, 1, 1, 0, 0, 0)  # archives are the same bytes at any time


class _Call:
    def __reduce__(self) -> Any:
        return (print, ("called",))


def safetensors(header: object, data: bytes) -> bytes:
    """A file with this header, which is written as it is if it is bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one_tensor(rows: int, data: bytes) -> bytes:
    """A good file of float32 [rows, HIDDEN]."""
    return safetensors({"a": {"dtype": "F32", "shape": [rows, HIDDEN], "data_offsets": [0, len(data)]}}, data)


def torch_file(pickled: bytes, data: bytes, compressed: bool = False) -> bytes:
    """An archive like one of torch.save's, with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (("data.pkl", pickled), ("byteorder", b"little"), ("data/0", data)):
            info = zipfile.ZipInfo(f"archive/{name}", _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
            archive.writestr(info, content)
    return file.getvalue()


def tensor_pickle(rows: int, columns: int, stride: int, offset: int = 0) -> bytes:
    """What torch.save writes for a tensor of float32."""

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = (
        b"("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text("0")
        + text("cpu")
        + number(rows * columns % 2**31)
        + b"tQ"
    )
    shape = number(rows) + number(columns) + b"\x86" + number(stride) + number(1) + b"\x86"
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + shape + b"\x89" + hooks + b"tR."


def _floats(draw: random.Random, count: int) -> bytes:
    value = draw.choice((0.0, 1e-3, -1.0, 3e38, 1e-45)) if draw.random() < 0.8 else draw.choice((math.nan, math.inf))
    return struct.pack("<f", value) * count


def _a_tensor(draw: random.Random) -> bytes:
    """A good file whose tensor may have another shape, another type or values that are not finite."""
    rows = draw.choice((0, 1, 2, 16, 17, 300)) if draw.random() < 0.98 else draw.choice((2_047, 2_049))
    columns = draw.choice((1, HIDDEN - 1, 2 * HIDDEN)) if draw.random() < 0.15 else HIDDEN
    data = _floats(draw, rows * columns)
    if draw.random() < 0.4:
        stride, offset = draw.choice((columns, columns, columns, 0, -1, 1)), draw.choice((0, 0, 0, 1, -1, 2**31 - 1))
        return torch_file(tensor_pickle(rows, columns, stride, offset), data)
    dtype = draw.choice(tuple(_DTYPES)) if draw.random() < 0.2 else "F32"
    shape = draw.choice(
        ([rows, columns], [rows, columns], [1, rows, columns], [rows * columns], [columns, rows], [2, 1])
    )
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, rows * columns * _DTYPES[dtype]]}
    return safetensors({"a": entry}, (data * 2)[: rows * columns * _DTYPES[dtype]])


def _false_claims(draw: random.Random) -> bytes:
    """Sizes, offsets and names that the file does not have, and pickles that are none of a tensor."""
    data = _floats(draw, HIDDEN)
    size = draw.choice((2**31, 2**40, 2**63, 2**64, -1))
    shape = draw.choice(([size, HIDDEN], [1, size], [1] * 99, [], [1.0, HIDDEN], "a", None, [None], [[1], HIDDEN]))
    offsets = draw.choice(([0, len(data)], [0, size], [size, 0], [len(data), 0], [], [0], "a", None))
    entry: Any = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    header = draw.choice(
        (
            {"a": entry},
            {"a": entry, "b": entry},
            {"__metadata__": {"a": "b" * 10_000}},
            {"a": draw.choice((None, 1, [], "x"))},
            b"[" * draw.choice((100, 60_000, 90_000)),
            b"{" * 60_000,
            b'{"a":' * 10_000,
            b"\xff" * 100,
            b"",
        )
    )
    pickled = draw.choice(
        (
            pickle.dumps(_Call(), 2),
            pickle.dumps([1, {"a": b"b" * 100}], 2),
            b"\x80\x02" + b"N" * draw.choice((10, 4_000, 100_000)) + b".",
            b"\x80\x02" + b"(" * 2_000 + b"t" * 2_000 + b".",
            b"\x80\x02Nr\xff\xff\xff\xff.",
            b"\x80\x02\x8b\xff\xff\xff\x7f",
            b"",
            tensor_pickle(1, 2**31 - 1, 1),
            tensor_pickle(2**30, HIDDEN, HIDDEN),
        )
    )
    if draw.random() < 0.5:
        return safetensors(header, data)
    return torch_file(pickled, draw.choice((data, bytes(1 << 20))), compressed=draw.random() < 0.3)


def embeddings(draw: random.Random) -> Body:
    """Embeddings of a prompt or of several, next to other fields or alone."""
    files: list[str] = []
    damages: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        data = bytearray((_a_tensor if draw.random() < 0.7 else _false_claims)(draw))
        damage = draw.randrange(10)
        if damage == 1:
            del data[draw.randrange(len(data)) :]
        elif damage == 2:
            for at in draw.choices(range(min(len(data), 2_000)), k=draw.randint(1, 20)):
                data[at] = draw.randrange(256)
        elif damage == 3:
            data += data[: draw.randint(1, 1_000)]
        text = base64.b64encode(data).decode()
        if damage == 4 and draw.random() < 0.5:
            text = draw.choice(
                (text[:-1], text + "=", text.replace("A", "-"), "data:application/octet-stream;base64," + text)
            )
        files.append(text)
        damages.append(str(damage))
    body: dict[str, Any] = {**TEXT.body, "prompt_embeds": files if len(files) > 1 or draw.random() < 0.3 else files[0]}
    body["prompt"] = draw.choice((None, "", [], "Hi", ["a", "b"], [1, 2]))
    for name in (
        "truncate_prompt_tokens",
        "echo",
        "prompt_logprobs",
        "n",
        "cache_salt",
        "stream",
        "repetition_penalty",
    ):
        if draw.random() < 0.15:
            body[name] = draw.choice((1, 2, 16, True, 1.5, draw.choice(HOSTILE)))
    return TEXT.path, write(body), f"prompt_embeds: {len(files)} files, damages {' '.join(damages)}"
