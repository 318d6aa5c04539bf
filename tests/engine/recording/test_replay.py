"""A recorded run is replayed with the same decisions; what was changed or cut is named; texts stay secret."""

import itertools
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig, PreemptionMode, SchedulingPolicy
from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.main import make_app
from pagoda.core.kv import KVGroupSpec
from pagoda.core.request import MediaItem, PromptEmbeds, Request
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.engine.recording.files import NUM_FILES, RecordingFiles
from pagoda.engine.recording.format import RecordedSettings, read_recording
from pagoda.engine.recording.recorder import RecordingScheduler
from pagoda.engine.recording.replay import replay
from pagoda.engine.recording.selection import Selection
from pagoda.executors.fake import FakeExecutor
from tests.core.traffic import Failure, Setting, Traffic, make_request
from tests.engine.driver import drive, make_core, request
from tests.engine.recording.recorded_traffic import record_traffic

SECRET = "alice-and-bob"


def setting_of(rng: random.Random) -> Setting:
    depth = rng.choice((1, 2))
    options = SchedulerOptions(
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice((8, 24)),
        scheduling_policy=rng.choice(list(SchedulingPolicy)),
        preemption_mode=rng.choice(list(PreemptionMode)),
        pipeline_depth=depth,
        async_scheduling=depth > 1,
        max_loras=rng.choice((0, 2)),
        prefix_hash_seed=99,
    )
    return Setting(options, CacheConfig(block_size=4), num_blocks=10, num_host_blocks=12)


def record(
    path: Path,
    seed: int,
    *,
    with_tokens: bool = False,
    num_steps: int = 60,
    max_bytes: int = 1 << 20,
    pauses: bool = True,
) -> None:
    """Run random requests, some of which share prefixes, are aborted or fail, and record them."""
    rng = random.Random(seed)
    setting = setting_of(rng)
    traffic = Traffic(setting)
    record_traffic(traffic, path, with_tokens=with_tokens, max_bytes=max_bytes)
    texts = [[rng.randrange(7) for _ in range(24)] for _ in range(2)]
    handles = itertools.count(1)

    def add() -> None:
        prompt = rng.choice(texts)[: rng.randrange(1, 24)] + [rng.randrange(7) for _ in range(rng.randrange(3))]
        sampling = SamplingParams(
            n=rng.choice((1, 1, 2)), max_tokens=rng.randrange(1, 12), stop_token_ids=(3,), min_tokens=0
        )
        handle = next(handles)
        traffic.add(
            Request(
                f"{SECRET}-{handle}",
                np.array(prompt, np.int32),
                sampling,
                arrival_time_s=traffic.clock.now(),
                priority=rng.randrange(3),
                handle=handle,
                seed=handle,
                eos_token_ids=(5,),
                cache_salt=rng.choice((None, SECRET)),
            )
        )

    for number in range(num_steps):
        if rng.random() < 0.5:
            add()
        # More than can run, so that some are left when a step fails.
        while not pauses and sum(traffic.scheduler.get_request_counts()) < setting.scheduler.max_num_seqs + 2:
            add()
        if rng.random() < 0.05 and traffic.scheduler.running_ids():
            traffic.abort(traffic.scheduler.running_ids()[:1])
        if len(traffic.in_flight) < traffic.depth:
            fails = rng.random() < 0.03
            traffic.plan(lambda _, fails=fails: Failure() if fails else None)
        if len(traffic.in_flight) >= traffic.depth:
            traffic.deliver()
        if pauses and number % 50 == 49:  # nothing runs for a while
            while traffic.in_flight:
                traffic.deliver()
            traffic.drain()
    traffic.abort(
        [*traffic.scheduler.running_ids(), *traffic.scheduler.waiting_ids(), *traffic.scheduler.swapped_ids()]
    )
    while traffic.in_flight:
        traffic.deliver()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("with_tokens", [False, True], ids=["made-up", "tokens"])
def test_a_recorded_run_is_replayed_without_a_difference(tmp_path: Path, seed: int, with_tokens: bool) -> None:
    path = tmp_path / "run.jsonl"
    record(path, seed, with_tokens=with_tokens)
    found = replay(path)
    assert found.difference is None
    assert found.cut == ""
    assert found.num_steps > 30
    assert found.num_requests > 15


def test_the_recorded_runs_share_blocks_preempt_and_swap(tmp_path: Path) -> None:
    seen: set[str] = set()
    for seed in range(6):
        record(tmp_path / f"{seed}", seed)
        lines, _ = read_recording(tmp_path / f"{seed}")
        events = [event for line in lines for event in line.get("events", ())]
        seen |= {name for name, _ in events}
        seen |= {"hit" for name, fields in events if name == "Admitted" and fields["num_cached"]}
        seen |= {"ends at a token" for line in lines if (line.get("result") or {}).get("ends")}
    assert {"Preempted", "Swapped", "Failed", "hit", "ends at a token"} <= seen


def test_a_changed_setting_shows_the_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 1)
    found = replay(path, {"max_num_seqs": 1})
    assert found.difference is not None
    assert found.difference.step < 10
    assert found.difference.recorded != found.difference.replayed


def test_only_what_is_selected_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 1)
    lines, _ = read_recording(path)
    number, line = next((n, one) for n, one in enumerate(lines) if one["op"] == "schedule" and one["step"] == 20)
    line["digest"][0] += 1  # as if another version had decided otherwise
    line["events"].append(["Held", {"client": 0, "handle": 10**9, "step": 20}])
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in lines))
    at_s = line["at"] - lines[0]["at"]
    found = replay(path)
    assert found.difference is not None
    assert (found.difference.line, found.difference.step) == (number + 1, 20)
    for hidden in ("step=0-19", "step=21-", "request=r1", "adapter=x", f"time={at_s + 1}-", "client=7"):
        assert replay(path, selection=Selection.of([hidden])).difference is None, hidden
    for shown in ("step=20", "step=10-30", f"time=0-{at_s}"):
        assert replay(path, selection=Selection.of([shown])).difference == found.difference, shown
    for wrong in ("steps=3", "step=x", "request=", "r3"):
        with pytest.raises(ConfigError, match="--filter"):
            Selection.of([wrong])


def test_calls_are_made_at_the_recorded_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 1)
    clock, slept = VirtualClock(), list[float]()
    monkeypatch.setattr("time.monotonic", clock.now)
    monkeypatch.setattr("time.sleep", lambda seconds: (clock.advance(seconds), slept.append(seconds)))
    lines, _ = read_recording(path)
    replay(path, speed=4.0)
    assert sum(slept) == pytest.approx((lines[-1]["at"] - lines[0]["at"]) / 4)


def test_a_file_that_was_cut_says_so_and_is_replayed_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"\n", 0, len(whole) // 2) - 5])
    found = replay(path)
    assert found.difference is None
    assert "is cut in line" in found.cut
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:40]))
    assert "requests had not ended" in replay(path).cut


def test_a_recording_ends_at_its_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 3, num_steps=49, max_bytes=20_000)
    assert path.stat().st_size < 20_100
    found = replay(path)
    assert found.difference is None
    assert found.cut == "the file had its largest size"


def test_a_new_file_begins_when_nothing_runs_and_the_oldest_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    (tmp_path / "run.jsonl.other").touch()
    record(path, 3, num_steps=600, max_bytes=60_000)
    names = {one.name for one in tmp_path.iterdir()} - {"run.jsonl.other"}
    assert len(names) == NUM_FILES
    assert "run.jsonl" not in names
    for name in names:
        found = replay(tmp_path / name)
        assert found.difference is None
        assert found.num_steps > 5
        assert (tmp_path / name).stat().st_size < 60_100


@pytest.mark.parametrize(
    ("seed", "with_tokens"),
    [
        (3, False),
        (8, True),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(8, False, marks=pytest.mark.slow),
    ],
)
def test_the_newest_files_of_a_server_that_is_never_idle_are_replayed(
    tmp_path: Path, seed: int, with_tokens: bool
) -> None:
    path = tmp_path / "run.jsonl"
    record(path, seed, num_steps=700, max_bytes=120_000, pauses=False, with_tokens=with_tokens)
    files = list(tmp_path.iterdir())
    assert len(files) == NUM_FILES
    assert path not in files
    num_steps: list[int] = []
    for file in files:
        lines, _ = read_recording(file)
        assert lines[1]["op"] == "resume"
        found = replay(file)
        assert found.difference is None
        assert file.stat().st_size < 120_100
        num_steps.append(found.num_steps)
    assert sorted(num_steps)[1] > 50  # the newest one may just have begun


def test_requests_that_fill_most_of_a_file_are_not_begun_again_and_again(tmp_path: Path) -> None:
    traffic = Traffic(Setting(SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=8), CacheConfig(block_size=4)))
    record_traffic(traffic, tmp_path / "run", max_bytes=9_000)
    for number in range(20):
        traffic.add(make_request(number, [number % 7] * 40, SamplingParams(max_tokens=20)))
    while traffic.scheduler.has_unfinished_requests():
        traffic.step()
    assert traffic.scheduler.make_stats().preemptions <= 2
    traffic.add(make_request(20, [1, 2, 3], SamplingParams(max_tokens=2)))
    traffic.drain()
    assert [replay(file).difference for file in tmp_path.iterdir()] == [None] * len(list(tmp_path.iterdir()))
    assert not replay(max(tmp_path.iterdir())).cut


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_goes_on_with_the_same_tokens_when_a_full_file_is_followed_by_the_next(
    tmp_path: Path, depth: int
) -> None:
    def run(max_bytes: int) -> dict[tuple[str, int], list[int]]:
        is_async = depth > 1
        options = SchedulerOptions(pipeline_depth=depth, async_scheduling=is_async)
        core = make_core(
            lambda rows: FakeExecutor(rows, 257, 4, vocab_size=1000), pipeline_depth=depth, async_scheduling=is_async
        )
        files = RecordingFiles(tmp_path / f"{max_bytes}", VirtualClock(), max_bytes)
        files.begin()
        settings = RecordedSettings(options, CacheConfig(block_size=4), (KVGroupSpec(layers=(0,)),), 64, 256)
        core._scheduler = RecordingScheduler(core._scheduler, files, settings)
        params = [SamplingParams(max_tokens=10 + 8 * number, n=2, ignore_eos=True) for number in range(12)]
        return drive(core, [request(number, [number] * 9, one) for number, one in enumerate(params)]).tokens

    assert run(30_000) == run(1 << 20)
    files = [path for path in tmp_path.iterdir() if path.name.startswith("30000")]
    assert len(files) == NUM_FILES
    assert [replay(path).difference for path in files] == [None] * NUM_FILES


@pytest.mark.parametrize("given", ["media", "embeddings"])
def test_what_is_not_in_the_file_is_not_computed_and_the_request_is_named(tmp_path: Path, given: str) -> None:
    options = SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=8, encoder_budget=6, encoder_cache_tokens=9)
    traffic = Traffic(Setting(options, CacheConfig(block_size=4)))
    record_traffic(traffic, tmp_path / "run")
    embeds = PromptEmbeds.of_first(np.zeros((2, 1), np.float32)) if given == "embeddings" else None
    media = (MediaItem("a", 1, 2),) if given == "media" else ()
    traffic.add(make_request(1, [1, 2, 3], SamplingParams(max_tokens=1)))
    traffic.drain()
    traffic.add(make_request(2, [1, 2, 3], SamplingParams(max_tokens=1), media=media, prompt_embeds=embeds))
    traffic.drain()
    executor = FakeExecutor(2, 65, 4, vocab_size=7)
    executor.start()
    executor.set_pools(16, 0)
    with pytest.raises(ConfigError, match="r2 has images, sounds or embeddings, which are not recorded"):
        replay(tmp_path / "run", start_model=lambda settings, engine: (executor, 7))


def test_a_full_disk_ends_the_recording_and_not_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = RecordingFiles(tmp_path / "run.jsonl", VirtualClock())
    files.begin()
    with Path("/dev/full").open("wb", buffering=0) as files._file:
        files.write("reset", events=[])
    assert "run.jsonl ends, because it cannot be written" in caplog.text
    assert not files.is_open
    assert not files.is_due


def test_no_token_no_id_no_salt_and_no_seed_is_in_the_file_unless_tokens_are_asked_for(tmp_path: Path) -> None:
    record(tmp_path / "made-up", 4)
    record(tmp_path / "tokens", 4, with_tokens=True)
    for name in ("made-up", "tokens"):
        assert SECRET.encode() not in (tmp_path / name).read_bytes()
        lines, _ = read_recording(tmp_path / name)
        assert lines[0]["settings"]["options"]["prefix_hash_seed"] == 0
        tokens = [token for line in lines for token in line.get("prompt", ())]
        tokens += [token for line in lines for one in (line.get("result") or {}).get("sampled", ()) for token in one]
        small = sum(token < 100 for token in tokens) / len(tokens)  # the vocabulary has 7 tokens
        assert small == 1.0 if name == "tokens" else small < 0.01


def test_equal_texts_are_made_up_anew_in_each_recording(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(tmp_path / name, 5)
    prompts = [[line["prompt"] for line in read_recording(tmp_path / name)[0] if line["op"] == "add"] for name in "ab"]
    assert len(prompts[0]) == len(prompts[1])
    assert not any(mine == theirs for mine, theirs in zip(*prompts, strict=True))


@pytest.mark.parametrize(
    ("text", "said"), [(b"", "is not a recording"), (b'{"op":"begin","version":99}\n', "has version 99")]
)
def test_another_file_is_refused_by_name(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        replay(tmp_path / "x")


def test_an_engine_records_and_the_command_replays_and_names_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, 6)
    assert CliRunner().invoke(make_app("replay"), ["replay", str(path)]).exit_code == 0
    changed = CliRunner().invoke(make_app("replay"), ["replay", str(path), "--set", "max-num-seqs=1"])
    assert changed.exit_code == 1
    assert "first difference in line" in changed.output
