"""The memory that is reserved for an adapter is what one of the largest rank takes."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from pagoda.kernels.linear.packed import PackedWeight
from pagoda.kernels.low_rank.packed import PackedLowRank
from pagoda.kernels.native.build import NativeUnavailable
from pagoda.kernels.native.library import load
from pagoda.kernels.select import select_ops
from pagoda.layers.lora_targets import lora_targets
from pagoda.loading.adapters.files import AdapterTargets
from pagoda.loading.loader import load_model
from pagoda.loading.model_config import read_architecture, read_model
from pagoda.loading.model_files import identify
from pagoda.loading.weight_memory import adapter_memory
from pagoda.worker.adapters import AdapterLimits, AdapterStore
from pagoda.worker.devices.cpu import CpuDevice
from tests.engine.lora_adapters import write_adapter
from tests.models.tiny import make_model, save

CPU = torch.device("cpu")


@pytest.mark.parametrize("rank", [5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_an_adapter_of_everything(
    name: str, dtype: torch.dtype, rank: int, tmp_path: Path, without_native: Callable[[str], NoReturn]
) -> None:
    try:
        load()
    except NativeUnavailable as error:
        without_native(str(error))
    files = identify(save(make_model(name), tmp_path / "model"))
    modules = {path.rpartition(".")[2] for path in lora_targets(read_model(files))}
    lora = write_adapter(tmp_path / "adapter", files, rank, 1, modules)
    ops = select_ops("native", CpuDevice(1))
    model = load_model(files, ops, dtype, CPU)
    store = AdapterStore(
        model, AdapterTargets(read_architecture(files)[0], model), ops, dtype, CPU, AdapterLimits(2, rank)
    )
    store.load(lora)
    slot = store.acquire(lora)
    held = 0
    for table in store.tables.values():
        assert isinstance(table, PackedLowRank)
        held += sum(part.panels.nbytes for part in table._kept[slot] if isinstance(part, PackedWeight))
    reserved = adapter_memory(model, rank, str(dtype).removeprefix("torch."), packed=True)
    assert held == reserved
    plain = adapter_memory(model, rank, "float32", packed=False)
    assert plain == sum(4 * rank * (len(one.rows) + one.inputs) for one in lora_targets(model).values())
