"""Kill the engine of a model with recurrent state in mid-stream, under load: every number is what it is without.

Its state dies with it: the next engine computes it again, from the prompt and the tokens that clients have.
"""

import asyncio
from pathlib import Path

from tests.engine.byte_llama import EOS, VOCAB, write_byte_tokenizer
from tests.models.tiny import make_model, save
from tests.server.live import serving
from tests.server.test_async_scheduling import asks
from tests.server.test_replay import ask_all

FLAGS = ("--max-model-len", "512", "--block-size", "8", "--max-num-batched-tokens", "48")


def test_kills_change_no_number(tmp_path: Path) -> None:
    """Of streams, several outputs, searches and grammars, some of which are preempted for lack of blocks."""
    shape = {"vocab_size": VOCAB, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": EOS}
    folder = write_byte_tokenizer(save(make_model("lfm2", **shape), tmp_path / "model"))
    model = ("--model", str(folder), *FLAGS)
    again = {"prompt": [3 + k * k % 250 for k in range(70)], "max_tokens": 20, "temperature": 0}
    with serving(tmp_path, *model, "--num-blocks", "600") as server:
        expected = asyncio.run(ask_all(server, asks()[:9]))
        assert all(one["status"] == 200 for one in expected)
        answer = server.post("/v1/completions", again)[1]["choices"]
    with serving(tmp_path, *model, "--num-blocks", "60", stepped=True) as server:
        assert asyncio.run(ask_all(server, asks()[:9], kill_after=(150, 350))) == expected
        assert server.metric("num_preemptions_total") > 0
        assert server.wait_idle()["engine_restarts"] == 2
        # The new engine finds what it keeps itself.
        assert [server.post("/v1/completions", again)[1]["choices"] for _ in range(2)] == [answer] * 2
        assert server.metric("prefix_cache_hits_total") > 0
