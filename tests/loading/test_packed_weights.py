"""Regions of packed matrices: rows in another order, columns that end within a group, scales of a whole matrix."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagoda.base.errors import ConfigError
from pagoda.kernels.linear.quantize import values_of
from pagoda.loading.pieces import Region
from pagoda.loading.quantization import BYTES, GPTQ, PACKED, PackedFormat
from pagoda.loading.weights import PackedWeights

IN, OUT = 256, 16
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
WHOLE = Region(None, range(OUT), range(IN))
GENERATOR = torch.Generator().manual_seed(3)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=GENERATOR).to(torch.int32)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR).half()


def signed(*shape: int, middle: int = 128) -> torch.Tensor:
    return torch.randint(-middle, middle, shape, generator=GENERATOR).to(torch.int8)


def gptq(group: int) -> dict[str, torch.Tensor]:
    groups = IN // group
    stored = {"qweight": words(IN // 8, OUT), "qzeros": words(groups, OUT // 8), "scales": scales(groups, OUT)}
    return {**stored, "g_idx": (torch.arange(IN) // group).int()}


def opened(folder: Path, stored: PackedFormat, tensors: dict[str, torch.Tensor]) -> PackedWeights:
    save_file({f"layer.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return PackedWeights(folder, stored)


def values(weights: PackedWeights, region: Region = WHOLE, order: tuple[int, ...] | None = None) -> torch.Tensor:
    weight = weights.read_codes("layer.weight", region, order)
    assert weight is not None
    return values_of(weight)


def of_one_scale(layout: str, bits: int) -> tuple[PackedFormat, dict[str, torch.Tensor]]:
    """A matrix with one scale and zero point, as compressed-tensors has it with the strategy `tensor`."""
    middle = 1 << (bits - 1)
    shared = {"weight_scale": scales(1), "weight_zero_point": signed(1, middle=middle)}
    if layout == "bytes":
        return PackedFormat("compressed-tensors", BYTES, None, False, 8), {"weight": signed(OUT, IN), **shared}
    packed = {"weight_packed": words(OUT, IN * bits // 32), **shared}
    return PackedFormat("compressed-tensors", PACKED, None, False, bits), packed


CASES = {
    "groups as they are held": (PackedFormat("gptq", GPTQ, 128, False, stored_zero=1), gptq(128)),
    "a group per row": (
        PackedFormat("compressed-tensors", PACKED, None, True),
        {"weight_packed": words(OUT, IN // 8), "weight_scale": scales(OUT, 1)},
    ),
    "a scale of the matrix": of_one_scale("words", 4),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_in_another_order_can_be_read_again(case: str, tmp_path: Path) -> None:
    weights = opened(tmp_path, *CASES[case])
    stored = values(weights)
    expected = stored.unflatten(0, (-1, len(ORDER)))[:, ORDER].flatten(0, 1)
    for _ in range(2):
        assert torch.equal(values(weights, order=ORDER), expected)
    assert torch.equal(values(weights), stored)


def test_columns_that_end_within_a_group_whose_order_is_stored(tmp_path: Path) -> None:
    """As four ranks divide them, where desc_act is set and g_idx counts up."""
    weights = opened(tmp_path, PackedFormat("gptq", GPTQ, 128, False, stored_zero=1, ordered=True), gptq(128))
    shares = [values(weights, Region(None, range(OUT), range(at, at + 64))) for at in range(0, IN, 64)]
    assert torch.equal(torch.cat(shares, 1), values(weights))


@pytest.mark.parametrize(("layout", "bits"), [("bytes", 8), ("words", 4), ("words", 8)])
def test_a_zero_point_of_the_whole_matrix(layout: str, bits: int, tmp_path: Path) -> None:
    stored, tensors = of_one_scale(layout, bits)
    middle = 1 << (bits - 1)
    if layout == "bytes":
        codes = tensors["weight"].int()
    else:
        packed, shifts = tensors["weight_packed"], torch.arange(0, 32, bits)
        codes = ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1) - middle
    expected = (codes - tensors["weight_zero_point"].int()) * tensors["weight_scale"].float()
    assert torch.equal(values(opened(tmp_path, stored, tensors)), expected)


def test_columns_that_change_places_are_refused(tmp_path: Path) -> None:
    weights = opened(tmp_path, *CASES["groups as they are held"])
    with pytest.raises(ConfigError, match=r"layer\.weight' is quantised: the columns of such a matrix change places"):
        weights.read_into("layer.weight", torch.empty(OUT, IN), replace(WHOLE, taps=4))
