"""A server with a tiny model is recorded, with all that can happen, and each file is replayed: the model, too."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from pagoda.assembly.recorded_model import start_recorded_model
from pagoda.cli.main import make_app
from pagoda.engine.recording.format import Line, read_recording
from pagoda.engine.recording.replay import replay
from pagoda.engine.recording.selection import Selection
from tests.engine.byte_llama import write_byte_llama
from tests.engine.lora_adapters import write_adapter
from tests.server.live import LiveServer, serving
from tests.server.test_replay import Ask, ask_all, told

SECRET = "alice-and-bob"
TOLD = {"return_token_ids": True}  # by which tokens are counted
STORY = "one two three, " * 5
DRAFTS = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}
FLAGS = (
    *("--max-num-seqs", "5", "--num-blocks", "20", "--max-model-len", "256", "--max-num-batched-tokens", "64"),
    *("--speculative-config", json.dumps(DRAFTS), "--enable-lora", "--max-loras", "1"),
)


def asks() -> list[Ask]:
    """Return requests that share prefixes, outgrow the KV cache, use an adapter, a grammar, beams and several texts."""
    extras: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"n": 2},
        {"structured_outputs": {"regex": "[a-z]{12,30}"}},
        {"model": "mine"},
        {"use_beam_search": True, "n": 2, "temperature": 0.0, "max_tokens": 8, "stream": False},
        {"model": "mine", "temperature": 0.0},
        {"min_tokens": 20, "stop": ["three, one"], "temperature": 0.0},
        {"min_tokens": 5, "stop_token_ids": [65, 66], "logit_bias": {"65": 100, "66": 90}},  # 66 never ends one
    ]
    return [
        (
            "/v1/completions",
            {"prompt": STORY + f"{n % 3} ", "max_tokens": 56, "seed": n, "user": SECRET, **TOLD, **extra},
        )
        for n, extra in enumerate(extras)
    ]


async def leave_early(server: LiveServer) -> None:
    """Ask for a long text, and leave when some of it is there."""
    so_far: Counter[str] = Counter()
    body = {"prompt": STORY, "max_tokens": 170, "ignore_eos": True, "return_token_ids": True}
    async with aiohttp.ClientSession(server.url) as session:
        asked = asyncio.create_task(told(session, ("/v1/completions", body), so_far))
        while so_far["tokens"] < 3:
            await asyncio.sleep(0.02)
        asked.cancel()


@pytest.fixture(scope="module", params=["tokens", pytest.param("made-up", marks=pytest.mark.slow)])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of a server whose engine was killed once."""
    folder = tmp_path_factory.mktemp("recording")
    model = write_byte_llama(folder / "model")
    write_adapter(folder / "adapter", model, rank=4, seed=1)
    flags = ["--model", str(model), *FLAGS, "--lora-modules", f"mine={folder / 'adapter'}"]
    flags += ["--record", str(folder / "run")]
    flags += ["--record-tokens"] * (request.param == "tokens")
    with serving(folder, *flags, stepped=True) as server:
        asyncio.run(leave_early(server))
        server.wait_idle()
        asyncio.run(ask_all(server, asks(), kill_after=(60,)))
        server.wait_idle()
    return [folder / "run", folder / "run.1"]


def seen_in(lines: list[Line]) -> set[str]:
    events = [event for line in lines for event in line.get("events", ())]
    seen = {name for name, _ in events}
    seen |= {"hit" for name, fields in events if name == "Admitted" and fields["num_cached"]}
    seen |= {"adapter" for line in lines if line.get("lora")}
    seen |= {
        "asked" for line in lines if line.get("prepared", {}).get("answers")
    }  # if the adapter was ready, or why not
    results = [line["result"] for line in lines if line.get("result")]
    seen |= {"beams" for result in results if result["beams"]} | {"drafts" for result in results if result["drafts"]}
    return seen | {"resumed" for line in lines if any(line.get("prior", ()))} | {line["op"] for line in lines}


def test_each_file_is_replayed_without_a_difference(files: list[Path]) -> None:
    read = [read_recording(path)[0] for path in files]
    wanted = {"Preempted", "hit", "beams", "drafts", "DraftsVerified", "finish", "resumed", "adapter", "asked"}
    assert wanted <= seen_in(read[0]) | seen_in(read[1])
    for path in files:
        assert SECRET.encode() not in path.read_bytes()
        said = CliRunner().invoke(make_app("replay"), ["replay", str(path)])
        assert said.exit_code == 0, said.output
        assert "every decision is as recorded" in said.output


def test_the_model_computes_the_same_tokens_again(files: list[Path]) -> None:
    for path in files:
        head = read_recording(path)[0][0]
        found = replay(path, start_model=start_recorded_model)
        assert found.difference is None
        assert found.token is None
        assert (found.num_tokens > 50) == head["with_tokens"]
        assert {times.kind for times in found.times} >= {"prompt", "decode"}
        assert all(times.replayed_s > 0 for times in found.times)


def test_a_token_that_differs_is_named(files: list[Path], tmp_path: Path) -> None:
    lines, _ = read_recording(files[1])
    if not lines[0]["with_tokens"]:
        pytest.skip("made-up tokens are not compared")
    number, line = next((n, one) for n, one in enumerate(lines) if n > 40 and (one.get("result") or {}).get("sampled"))
    at = next(n for n, tokens in enumerate(line["result"]["sampled"]) if tokens and tokens[0] > 0)
    line["result"]["sampled"][at][0] += 1
    (tmp_path / "changed").write_text("".join(json.dumps(one) + "\n" for one in lines[: number + 1]))
    found = replay(tmp_path / "changed", None, Selection(), start_model=start_recorded_model)
    assert found.token is not None
    assert found.token.step == line["step"]
    assert found.token.got == line["result"]["sampled"][at][0] - 1 == found.token.expected - 1  # type: ignore[operator]


def test_a_token_that_could_continue_a_beam_and_differs_is_named(files: list[Path], tmp_path: Path) -> None:
    lines = next(found for path in files if "beams" in seen_in(found := read_recording(path)[0]))
    if not lines[0]["with_tokens"]:
        pytest.skip("made-up tokens are not compared")
    number, line = next((n, one) for n, one in enumerate(lines) if (one.get("result") or {}).get("beams"))
    candidates = line["result"]["beams"][0][1]
    candidates[1] += 1
    (tmp_path / "changed").write_text("".join(json.dumps(one) + "\n" for one in lines[: number + 1]))
    found = replay(tmp_path / "changed", None, Selection(), start_model=start_recorded_model)
    assert found.token is not None
    assert (found.token.step, found.token.expected) == (line["step"], candidates[1])
    assert found.token.got == candidates[1] - 1
