"""A device of another package (pagoda_npu, which `make test` installs) works everywhere; pagoda does not know it."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from pagoda import LLM, SamplingParams
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig, ParallelConfig
from pagoda.base.errors import CapacityError, ConfigError
from pagoda.cli import doctor
from pagoda.cli.main import main
from pagoda.kernels.activation import reference
from pagoda.ops.declare import Activation
from pagoda.worker import devices
from pagoda.worker.devices.device import Device
from tests.engine.byte_llama import write_byte_llama
from tests.server.live import serving

PROMPTS = ["the name is", "a", "12 and true"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_llama(tmp_path_factory.mktemp("model"))


def answers(model: Path, **options: object) -> list[list[int]]:
    with LLM(str(model), **{**SMALL, **options}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return answers(model, device="cpu", kernels="reference", num_blocks=64)


def test_an_llm_on_a_device_of_another_package_uses_its_kernels_and_its_memory(
    model: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    from pagoda_npu import MEMORY_BYTES

    with LLM(str(model), device="npu", **SMALL) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        worker = llm.llm_engine.core._executor.worker  # type: ignore[attr-defined]
        loaded = worker._model()
        assert (loaded.ops.name, loaded.device.name) == ("npu", "npu")
        assert loaded.ops.num_own > 16
        pool = llm.llm_engine.core.sizes.num_blocks * worker.measure([]).block_bytes[0]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert MEMORY_BYTES / 2 < pool < MEMORY_BYTES


def test_two_ranks_have_a_device_each(model: Path, expected: list[list[int]]) -> None:
    assert answers(model, device="npu", tensor_parallel_size=2, num_blocks=64) == expected


def test_a_server_runs_on_it(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    with serving(tmp_path, "--model", str(model), "--device", "npu", *flags) as server:
        body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, answer = server.post("/v1/completions", body)
        assert status == 200
        assert "on npu" in server.log.read_text()
    with LLM(str(model), device="cpu", num_blocks=64, **SMALL) as llm:  # type: ignore[arg-type]
        assert answer["choices"][0]["text"] == llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text


def test_plan_and_doctor_know_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", str(model), "--device", "npu", "--json", "--max-model-len", "64"])
    assert ended.value.code == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["device"].startswith("pretended NPU 0")
    assert plan["num_blocks"] * plan["kv_bytes_per_token"] * plan["block_size"] < 1 << 30
    assert plan["is_measured"]
    assert "npu: pretended, 1024 MiB each" in doctor.gpu_line()


def test_what_it_does_not_have_is_refused_in_its_own_words(model: Path) -> None:
    with pytest.raises(ConfigError, match="dtype='float16': an NPU does not have it"):
        resolve_engine(EngineConfig.from_options(model=str(model), device="npu", dtype="float16"))
    with pytest.raises(ConfigError, match="kernels='native' do not run on device 'npu'"):
        LLM(str(model), device="npu", kernels="native", **SMALL)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="kv_cache_memory=2147483648 does not fit"):
        LLM(str(model), device="npu", kv_cache_memory=1 << 31, **SMALL)  # type: ignore[arg-type]


def test_its_kernel_equals_the_reference() -> None:
    from pagoda_npu.kernels import gate

    x = torch.randn(5, 2 * 33, generator=torch.Generator().manual_seed(0)) * 4
    torch.testing.assert_close(gate(x, Activation.SILU), reference.gate(x, Activation.SILU))


class Available(Device):
    """A device that is there, of a package."""

    name = "abacus"


class Misnamed(Device):
    name = "other"


def test_auto_takes_a_device_of_another_package_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = ParallelConfig(threads=1)
    before = devices.select_device(auto).name
    assert before != "npu"
    monkeypatch.setattr(devices, "entry_points", lambda group: [_Loaded("abacus", Available)])
    assert devices.select_device(auto).name == ("abacus" if before == "cpu" else before)
    monkeypatch.setattr(devices, "entry_points", lambda group: [_Loaded("cpu", Available)])
    assert devices.select_device(auto).name == before, "a package has replaced one of pagoda's own devices"


class _Loaded:
    """An entry point whose class is known."""

    dist, value = None, "somewhere"

    def __init__(self, name: str, kind: type) -> None:
        self.name, self._kind = name, kind

    def load(self) -> type:
        return self._kind


def test_a_package_that_is_broken_is_named_and_keeps_no_other_device_from_being_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = EntryPoint("abacus", "no_such_package:Abacus", devices.GROUP)
    monkeypatch.setattr(devices, "entry_points", lambda group: [entry])
    with pytest.raises(ConfigError, match=r"device 'abacus' of the package '\?' \(no_such_package:Abacus\) cannot be"):
        devices.select_device(ParallelConfig(device="abacus"))
    assert devices.select_device(ParallelConfig(threads=1)).name in ("cuda", "cpu")
    assert "no_such_package" in caplog.text or devices.is_available("cuda")
    for kind in (Misnamed, int):
        monkeypatch.setattr(devices, "entry_points", lambda group, kind=kind: [_Loaded("abacus", kind)])
        with pytest.raises(ConfigError, match="is no subclass of pagoda.worker.devices.Device with that name"):
            devices.select_device(ParallelConfig(device="abacus"))
    with pytest.raises(ConfigError, match="unknown device 'abacos'; did you mean 'abacus'"):
        devices.select_device(ParallelConfig(device="abacos"))
