"""Embeddings of 1,000 texts of mixed length, compared with sentence-transformers and OpenVINO.

    python benchmarks/embeddings.py MODEL --rounds 5

MODEL: a sentence-transformers folder. Each engine loads it in a process of its own and embeds the same texts in turn,
round by round; one round more, the first, warms up. OpenVINO takes part if `openvino` is installed, or if
--openvino-python names the interpreter of an environment that has it and sentence-transformers. One JSON line is
printed for each round, then one with the median ratios of the peers' time to ours, and the largest differences between
their vectors and ours.

Peers get the texts in batches of --batch-size, sorted by length, as sentence-transformers does by itself. OpenVINO
computes as many batches at once as its throughput mode takes.
"""

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WORDS = Path(__file__).parent / "perplexity.txt"


def mixed_texts(count: int, seed: int) -> list[str]:
    """Return pieces of English of 2 to 400 words, most of them short (a median of 40)."""
    rng = random.Random(seed)
    words = WORDS.read_text().split()
    texts = []
    for _ in range(count):
        length = min(400, max(2, round(rng.lognormvariate(3.7, 0.9))))
        begin = rng.randrange(max(1, len(words) - length))
        texts.append(" ".join(words[begin : begin + length]))
    return texts


Embed = Callable[[Sequence[str]], np.ndarray]


def load_pagoda(model: str, threads: int, batch_size: int, dtype: str) -> Embed:
    from pagoda import LLM

    llm = LLM(model, dtype=dtype, threads=threads)

    def embed(texts: Sequence[str]) -> np.ndarray:
        outputs = llm.encode(texts, pooling_task="embed", truncate_prompt_tokens=-1, use_tqdm=False)
        return np.stack([output.outputs.data for output in outputs])

    return embed


def load_sentence_transformers(model: str, threads: int, batch_size: int, dtype: str) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def embed(texts: Sequence[str]) -> np.ndarray:
        found = loaded.encode(
            list(texts), batch_size=batch_size, show_progress_bar=False, normalize_embeddings=True,
            convert_to_tensor=True,
        )  # fmt: skip
        return found.float().numpy()

    return embed


def load_openvino(model: str, threads: int, batch_size: int, dtype: str) -> Embed:
    """Mean pooling and normalisation, as most models of this kind have."""
    import openvino
    import torch
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(model, device="cpu")
    tokenizer, encoder = loaded.tokenizer, loaded[0].auto_model

    class WithMask(torch.nn.Module):
        """The encoder with a mask of four dimensions: transformers' code that makes one cannot be traced."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(
            self, input_ids: torch.Tensor, token_type_ids: torch.Tensor, attention_mask: torch.Tensor
        ) -> torch.Tensor:
            hidden = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
            hidden = hidden.expand(-1, 1, input_ids.shape[1], -1)
            output = self.encoder(input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=hidden)
            return output.last_hidden_state

    example = dict(tokenizer(["an example", "another one"], padding=True, return_tensors="pt"))
    with torch.inference_mode():
        converted = openvino.convert_model(WithMask(), example_input=example)
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    compiled = openvino.Core().compile_model(
        converted,
        "CPU",
        {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "THROUGHPUT"},
    )

    def embed(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        found: dict[int, np.ndarray] = {}

        def pool(request: Any, given: tuple[list[int], np.ndarray]) -> None:
            places, mask = given
            pooled = (request.get_output_tensor(0).data * mask).sum(1) / mask.sum(1)
            found.update(zip(places, pooled / np.linalg.norm(pooled, axis=1, keepdims=True), strict=True))

        queue = openvino.AsyncInferQueue(compiled)
        queue.set_callback(pool)
        for begin in range(0, len(order), batch_size):
            places = order[begin : begin + batch_size]
            given = tokenizer(
                [texts[at] for at in places], padding=True, truncation=True, max_length=loaded.max_seq_length,
                return_tensors="np",
            )  # fmt: skip
            queue.start_async(dict(given), (places, given["attention_mask"][:, :, None].astype(np.float32)))
        queue.wait_all()
        return np.stack([found[at] for at in range(len(texts))])

    return embed


ENGINES: dict[str, Callable[[str, int, int, str], Embed]] = {
    "pagoda": load_pagoda,
    "sentence-transformers": load_sentence_transformers,
    "openvino": load_openvino,
}


def serve(arguments: argparse.Namespace) -> None:
    """Load one engine, then embed once for every line on standard input; write the seconds that it took."""
    texts = mixed_texts(arguments.texts, arguments.seed)
    embed = ENGINES[arguments.serve](arguments.model, arguments.threads, arguments.batch_size, arguments.dtype)
    print("ready", flush=True)
    for _ in sys.stdin:
        begin_s = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - begin_s
        np.save(arguments.out, vectors)
        print(json.dumps({"seconds": seconds}), flush=True)


class Engine:
    """An engine in a process of its own, which is idle except during `run`."""

    def __init__(self, name: str, arguments: argparse.Namespace, folder: Path) -> None:
        self.out = folder / f"{name}.npy"
        parents = ("serve", "out", "rounds", "openvino_python")
        given = {key: value for key, value in vars(arguments).items() if key not in parents}
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if key != "model"]
        python = arguments.openvino_python if name == "openvino" else None
        command = [python or sys.executable, __file__, arguments.model, *flags, "--serve", name, "--out", str(self.out)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read("ready")

    def _read(self, expected: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries may print lines of their own
            if line.startswith(expected):
                return line
        raise RuntimeError(f"the engine ended with {self._process.wait()}")

    def run(self) -> float:
        """Embed all texts; return the seconds that it took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds: float = json.loads(self._read("{"))["seconds"]
        return seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all engines in alternating rounds; return the summary."""
    has_openvino = arguments.openvino_python or importlib.util.find_spec("openvino")
    names = [name for name in ENGINES if name != "openvino" or has_openvino]
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: Engine(name, arguments, Path(folder)) for name in names}
        rounds: list[dict[str, float]] = []
        for number in range(arguments.rounds + 1):
            seconds = {name: round(engine.run(), 3) for name, engine in engines.items()}
            if number:
                rounds.append(seconds)
                print(json.dumps(seconds), flush=True)
        vectors = {name: np.load(engine.out) for name, engine in engines.items()}
        for engine in engines.values():
            engine.close()
    ratios = {name: round(statistics.median(each[name] / each["pagoda"] for each in rounds), 3) for name in names[1:]}
    differences = {name: float(np.abs(vectors[name] - vectors["pagoda"]).max()) for name in names[1:]}
    texts_per_s = arguments.texts / statistics.median(each["pagoda"] for each in rounds)
    return {"texts_per_s": round(texts_per_s, 1), "median_ratios": ratios, "largest_differences": differences}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--openvino-python", help="interpreter of an environment that has OpenVINO")
    parser.add_argument("--serve", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
    else:
        print(json.dumps(compare(arguments)))


if __name__ == "__main__":
    main()
