"""LLM and AsyncLLM over several ranks: in any kind of program, and when a rank dies."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda import LLM, AsyncLLM, SamplingParams
from pagoda.base.errors import RequestError, WorkerDied
from pagoda.base.lora import LoRARequest
from pagoda.base.structured_outputs import StructuredOutputsParams
from pagoda.process.child_process import children_of
from tests.cached_models import cached_model
from tests.engine.byte_llama import write_byte_llama
from tests.engine.lora_adapters import EVERYTHING, write_adapter

OPTIONS: dict[str, object] = {"max_model_len": 256, "dtype": "float32", "kv_cache_memory": "8MiB"}
PROMPTS = ["The sky is", "Once upon a time", "a"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_byte_llama(tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    with LLM(model, **OPTIONS) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def test_two_ranks_give_the_tokens_of_one_and_a_death_ends_the_llm(
    model: str, expected: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(children_of(os.getpid()))
    with LLM(model, tensor_parallel_size=2, **OPTIONS) as llm:
        ranks = set(children_of(os.getpid())) - before
        assert len(ranks) == 2
        assert [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)] == expected
        params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-d]{3,9}"))
        assert set(llm.generate("x", params)[0].outputs[0].text) <= set("abcd")
        os.kill(max(ranks), signal.SIGSTOP)  # so that it dies in the middle of a step
        stream = llm.stream("Once", GREEDY)
        assert capfd.readouterr().err == ""  # ranks log what the program that starts them does: here only warnings
        os.kill(max(ranks), signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"rank \d was killed by signal 9"):
            list(stream)
        with pytest.raises(WorkerDied, match=r"rank \d was killed by signal 9"):
            llm.generate("x", GREEDY)
    assert not ranks & set(children_of(os.getpid()))


@pytest.mark.slow
def test_two_ranks_run_a_gguf_from_its_own_codes() -> None:
    """Real weights of several kinds: a right answer, in less memory than the same weights take as bfloat16."""
    name = str(cached_model("gemma3-270m").path)
    before = set(children_of(os.getpid()))
    held: list[int] = []
    for quantization in (None, "none"):
        options = {"quantization": quantization, "max_model_len": 128, "kv_cache_memory": "16MiB"}
        with LLM(name, tensor_parallel_size=2, **options) as llm:
            assert "six, seven" in llm.generate("one, two, three, four, five,", GREEDY)[0].outputs[0].text
            held += map(_anonymous_bytes, set(children_of(os.getpid())) - before)
    assert max(held[:2]) + (80 << 20) < min(held[2:])


def _anonymous_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0]) << 10


def test_adapters_take_turns_on_two_ranks(model: str, tmp_path: Path) -> None:
    """More than there is room for: both ranks load and drop the same ones between the same steps."""
    for seed, name in enumerate("abc", 1):
        write_adapter(tmp_path / name, Path(model), 4 * seed, seed, EVERYTHING)
    (tmp_path / "broken").mkdir()
    adapters = [LoRARequest(name, 1, str(tmp_path / name)) for name in "abcab"]
    options = {**OPTIONS, "enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 16}
    found: list[list[list[int]]] = []
    for size in (1, 2):
        with LLM(model, tensor_parallel_size=size, **options) as llm:
            outputs = llm.generate(["Once"] * len(adapters), GREEDY, lora_request=adapters)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            with pytest.raises(RequestError, match="adapter_config.json"):
                llm.generate("Once", GREEDY, lora_request=LoRARequest("broken", 2, str(tmp_path / "broken")))
            llm.add_lora(LoRARequest("c", 7, str(tmp_path / "c")))
            assert llm.remove_lora(7)
    assert found[0] == found[1]
    assert len({str(tokens) for tokens in found[0]}) == 3


def test_a_death_ends_asyncllm(model: str) -> None:
    async def main() -> None:
        before = set(children_of(os.getpid()))
        llm = AsyncLLM(model, distributed_executor_backend="mp", **OPTIONS)
        assert [_ async for _ in llm.generate("Once", GREEDY)]
        (rank,) = set(children_of(os.getpid())) - before
        os.kill(rank, signal.SIGSTOP)  # so that it dies in the middle of a step
        first = asyncio.ensure_future(anext(llm.generate("Once", GREEDY)))
        while not (await llm._engine())._outputs.live_ids:
            await asyncio.sleep(0.001)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rank 0 was killed by signal 9"):
            await first
        await llm.close()
        assert set(children_of(os.getpid())) <= before

    asyncio.run(asyncio.wait_for(main(), 120))


PROGRAM = """
from pagoda import LLM, SamplingParams
print("imported once")
llm = LLM({model!r}, tensor_parallel_size=2, **{options!r})
outputs = llm.generate({prompts!r}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
print([list(output.outputs[0].token_ids) for output in outputs])
"""

NOTEBOOK = """
import asyncio
async def cell():
    exec(compile({program!r}, "<cell>", "exec"), {{"__name__": "__main__"}})
asyncio.run(cell())
"""


@pytest.mark.parametrize("kind", ["script", "notebook"])
def test_a_program_needs_no_main_guard(kind: str, model: str, expected: list[list[int]], tmp_path: Path) -> None:
    """A script that multiprocessing would run again in each process; and code without a file, in a running loop."""
    program = PROGRAM.format(model=model, options=OPTIONS, prompts=PROMPTS)
    if kind == "script":
        script = tmp_path / "script.py"
        script.write_text(program)
        command, text = [sys.executable, str(script)], ""
    else:
        command, text = [sys.executable, "-"], NOTEBOOK.format(program=program)
    folder = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": folder, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=180, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["imported once", str(expected)], "the program runs once, not in each rank"
    assert not list(tmp_path.glob("pagoda-*"))
