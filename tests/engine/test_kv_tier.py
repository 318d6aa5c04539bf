"""A model with blocks in files: whatever is found there or goes wrong, each request gets the tokens it gets alone."""

import asyncio
import hashlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagoda.assembly.assemble import build_engine_core
from pagoda.assembly.engine_setup import resolve_engine
from pagoda.base.config import EngineConfig
from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.cost_model import CostModel
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.clients.process_client import ProcessClient
from pagoda.engine.engine_core import EngineCore
from pagoda.tier.records import Records
from tests.engine.byte_llama import write_byte_llama
from tests.engine.clients import engine_in_process
from tests.engine.clients.engine_in_process import run_engine
from tests.engine.driver import Answers, drive, request, write_tiny_llama
from tests.engine.test_schedules_agree import BASE, traffic
from tests.generate import generate
from tests.tier.test_file_tier import until

SMALL = {**BASE, "num_blocks": 40}
PROMPT = [*range(10, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), 3)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read although computing with so small a model takes no longer."""
    monkeypatch.setattr(CostModel, "added_s", lambda *_: 0.0)


@pytest.fixture(autouse=True)
def host_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    monkeypatch.setattr("pagoda.base.kv_tier._HOST_FOLDER", str(folder))
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[tuple[str, int], list[int]]:
    return run(engine(model)).tokens


def engine(model: Path, folder: Path | None = None, size: str = "1GiB", **options: Any) -> EngineCore:
    return build_engine_core(config_of(model, folder, size, **options))


def config_of(
    model: Path, folder: Path | None, size: str = "1GiB", host: str | None = None, **options: Any
) -> EngineConfig:
    """host: the size of the part of the tier that is in memory."""
    parts = [f"host={host}"] * (host is not None) + [f"disk={folder}:{size}"] * (folder is not None)
    tier = {"kv_tier": ",".join(parts)} if parts else {}
    return EngineConfig.from_options(model=str(model), **{**SMALL, **tier, **options})


def run(core: EngineCore, on_step: Callable[[int, Answers], None] | None = None) -> Answers:
    answers = drive(core, [request(i, *each, eos=(2,)) for i, each in enumerate(traffic())], on_step)
    core.shutdown()
    return answers


def ask(core: EngineCore, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """Return the answer to a prompt, and how many of its tokens were loaded."""
    before = core.make_stats().tier_hits
    answers = drive(core, [request(0, prompt, SamplingParams(temperature=0, max_tokens=8))])
    return answers.tokens["r0", 0], core.make_stats().tier_hits - before


def files_of(folder: Path) -> list[Path]:
    return sorted(one for one in folder.glob("*/??/*") if one.is_file())


@pytest.mark.usefixtures("always")
def test_blocks_outlive_the_engine(model: Path, tmp_path: Path) -> None:
    first = engine(model, tmp_path)
    answer, num_loaded = ask(first)
    assert num_loaded == 0
    first.shutdown()
    assert len(files_of(tmp_path)) == (len(PROMPT) + 7) // 8, "the answer's full block, too"
    again = engine(model, tmp_path)
    assert ask(again) == (answer, 72)
    assert ask(again) == (answer, 0), "the pool has them now"
    assert again.reset_prefix_cache()
    assert ask(again) == (answer, 72)
    again.shutdown()


@pytest.mark.usefixtures("always")
def test_engines_share_blocks_in_memory_until_the_last_one_ends(model: Path, host_folder: Path) -> None:
    first = engine(model, host="1MiB")
    answer, _ = ask(first)
    until(lambda: len(files_of(host_folder)) == (len(PROMPT) + 7) // 8)
    second = engine(model, host="1MiB")
    first.shutdown()
    assert ask(second) == (answer, 72)
    second.shutdown()
    assert not host_folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_process_that_is_told_to_end_writes_what_waits(tmp_path: Path, is_restarted: bool) -> None:
    (tmp_path / "model").mkdir()
    folder, config = tmp_path / "tier", config_of(write_byte_llama(tmp_path / "model"), tmp_path / "tier")

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        params = SamplingParams(temperature=0, max_tokens=1)
        async for _ in generate(llm, PROMPT, params, "a"):
            pass
        assert len(files_of(folder)) < len(PROMPT) // 8
        if is_restarted:
            await client.restart()
            assert len(files_of(folder)) == len(PROMPT) // 8

    run_engine(work, ProcessClient(config, module="tests.engine.slow_disk_engine"), config)
    assert len(files_of(folder)) == len(PROMPT) // 8


@pytest.mark.slow
def test_kills_at_any_moment_change_no_token_and_lose_what_was_being_written(
    tmp_path: Path, host_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine with both parts of a tier, while requests that share their beginnings keep it busy."""
    monkeypatch.setenv("HOST_FOLDER", str(host_folder))
    monkeypatch.setattr(engine_in_process, "MOST_S", 600.0)  # of which starts on a busy machine take most
    (tmp_path / "model").mkdir()
    model, folder, rng = write_byte_llama(tmp_path / "model"), tmp_path / "tier", random.Random(46)
    config = config_of(model, folder, host="256KB")
    begin = rng.choices(range(10, 100), k=24)
    prompts = [begin + rng.choices(range(10, 100), k=length) for length in range(8, 56, 8) for _ in range(4)]
    alone = engine(model)
    expected = [ask(alone, prompt)[0] for prompt in prompts]
    alone.shutdown()
    num_right, kills_left = 0, 4

    async def ask_again(llm: AsyncEngine) -> None:
        nonlocal num_right
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        while kills_left:
            number = rng.randrange(len(prompts))
            *_, last = [output async for output in generate(llm, prompts[number], params)]
            if last.error is None:  # one that was in the batch of two kills is blamed for them
                assert list(last.outputs[0].token_ids) == expected[number]
                num_right += 1

    async def work(llm: AsyncEngine, client: ProcessClient) -> None:
        nonlocal kills_left
        busy = [asyncio.create_task(ask_again(llm)) for _ in range(6)]
        while kills_left:
            until_num = num_right + rng.randrange(4, 40)
            while num_right < until_num:
                await asyncio.sleep(rng.random() / 50)
                assert not any(task.done() for task in busy)
            there = files_of(folder)
            await engine_in_process.kill(client)
            assert set(there) <= set(files_of(folder)), "whatever was there still is"
            for part in (folder, host_folder):
                assert all(is_whole(path, part) for path in files_of(part))
                assert len(list(part.glob("*/writing-*"))) <= 1
            kills_left -= 1
        await asyncio.gather(*busy)
        assert client.stats().tier_hits

    run_engine(work, ProcessClient(config, module="tests.engine.tier_engine"), config)
    monkeypatch.setattr(CostModel, "added_s", lambda *_: 0.0)
    last = engine(model, folder)
    assert [ask(last, prompt)[0] for prompt in prompts] == expected
    assert last.make_stats().tier_hits
    last.shutdown()


def is_whole(path: Path, folder: Path) -> bool:
    root, shard, rest = path.relative_to(folder).parts
    data = path.read_bytes()
    return hashlib.sha256(root.encode() + bytes.fromhex(shard + rest) + data[32:]).digest() == data[:32]


@pytest.mark.parametrize("other", [{"block_size": 16}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_other_settings_find_nothing(model: Path, tmp_path: Path, other: dict[str, Any]) -> None:
    core = engine(model, tmp_path)
    ask(core)
    core.shutdown()
    core = engine(model, tmp_path, **other)
    assert ask(core)[1] == 0
    core.shutdown()


def test_other_weights_find_nothing(model: Path, tmp_path: Path) -> None:
    core = engine(model, tmp_path / "tier")
    ask(core)
    core.shutdown()
    (tmp_path / "other").mkdir()
    core = engine(write_tiny_llama(tmp_path / "other", 4), tmp_path / "tier")
    assert ask(core)[1] == 0
    core.shutdown()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 22, "preemption_mode": "recompute"},
        {"num_blocks": 22, "preemption_mode": "swap", "num_host_blocks": 50},
        {"pipeline_depth": 2, "async_scheduling": True},
        {"scheduling_mode": "phased", "max_num_batched_tokens": 128},
        {"kv_cache_dtype": "int8"},
        {"host": "40KB"},
    ],
    ids=str,
)
def test_schedules_with_a_tier_agree(
    model: Path, expected: dict[tuple[str, int], list[int]], options: dict[str, Any], tmp_path: Path, host_folder: Path
) -> None:
    """Of two engines, one after the other, the second with faults in the files of the first."""
    if "kv_cache_dtype" in options:
        expected = run(engine(model, **options)).tokens
    folder = tmp_path / "disk"
    assert run(engine(model, folder, **options)).tokens == expected
    rng = random.Random(str(options))

    def damage(_: int, __: Answers) -> None:
        if (files := files_of(folder) + files_of(host_folder)) and rng.random() < 0.3:
            _damage(rng, rng.choice(files))

    core = engine(model, folder, **options)
    assert run(core, damage).tokens == expected
    assert core.make_stats().tier_hits


def _damage(rng: random.Random, path: Path) -> None:
    kind = rng.choice(["gone", "cut", "flip"])
    if kind == "gone":
        path.unlink(missing_ok=True)
    elif kind == "cut":
        os.truncate(path, rng.randrange(path.stat().st_size))
    else:
        data = bytearray(path.read_bytes())
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def test_a_folder_that_is_too_small_keeps_the_latest(model: Path, tmp_path: Path) -> None:
    core = engine(model, tmp_path, size="20KB")

    def has_lost() -> bool:
        """A step is told what the writer has removed since the last one."""
        ask(core)
        return core.make_stats().num_tier_lost > 0

    drive(core, [request(i, *each, eos=(2,)) for i, each in enumerate(traffic())])
    until(has_lost)
    core.shutdown()
    assert 0 < sum(one.stat().st_size for one in files_of(tmp_path)) <= 20_000


def test_a_slow_disk_delays_a_request_no_longer_than_computing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(model, tmp_path)
    answer, _ = ask(core)
    core.shutdown()
    core = engine(model, tmp_path)
    ask(core, [*range(90, 10, -1)])  # what computing takes is known now
    read = Records.read

    def slow(records: Records, *args: Any) -> str:
        time.sleep(3)
        return read(records, *args)

    monkeypatch.setattr(Records, "read", slow)
    begin_s = time.monotonic()
    assert ask(core) == (answer, 0)
    assert time.monotonic() - begin_s < 3
    core.shutdown()


def test_a_disk_that_hangs_when_writing_delays_no_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(model, tmp_path)
    monkeypatch.setattr(Records, "write", lambda *_: time.sleep(20))
    begin_s = time.monotonic()
    ask(core)
    core.shutdown()
    assert time.monotonic() - begin_s < 15
    assert not files_of(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tier": "tape=/here:1GiB"}, "write disk=FOLDER:SIZE"),
        ({"kv_tier": "host=much"}, "is not a size"),
        ({"kv_tier": "host=1GiB,host=1GiB"}, "both with a comma"),
        ({"kv_tier": "host=1GiB,tape=/here:1GiB"}, "is not a size"),
        ({"kv_tier": "disk=here:8GiB"}, "absolute path"),
        ({"kv_tier": "disk=/here"}, "write disk=FOLDER:SIZE"),
        ({"kv_tier": "disk=/here:much"}, "is not a size"),
        ({"kv_tier": "disk=/here:0"}, "at least 1 byte"),
        ({"enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"distributed_executor_backend": "fake"}, "the executor 'fake'"),
        ({"record": "/tmp/recording"}, "does not go with record"),
        ({"device": "cuda"}, "does not go with a GPU"),
    ],
)
def test_what_does_not_go_with_a_tier_is_refused(model: Path, options: dict[str, Any], message: str) -> None:
    given = {**SMALL, "kv_tier": "disk=/here:1GiB", **options}
    with pytest.raises(ConfigError, match=message):
        resolve_engine(EngineConfig.from_options(model=str(model), **given))


@pytest.mark.parametrize(("window", "mixed"), [(12, False), (12, True)])
def test_models_with_windows_are_refused(tmp_path: Path, window: int, mixed: bool) -> None:
    model = write_tiny_llama(tmp_path, 3, window, mixed)
    with pytest.raises(ConfigError, match="every earlier token"):
        resolve_engine(EngineConfig.from_options(model=str(model), **SMALL, kv_tier="disk=/here:1GiB"))


def test_a_folder_that_cannot_be_used_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_tier: the folder .* cannot be used"):
        engine(model, tmp_path / "file")
