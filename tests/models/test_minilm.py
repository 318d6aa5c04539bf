"""MiniLM's real weights: the vectors of sentence-transformers."""

import pytest
import torch

from pagoda.base.pooling import PoolingKind
from pagoda.engine.tokenizers.load_tokenizer import load_tokenizer
from pagoda.kernels.native_ops import NativeOps
from pagoda.loading.loader import load_model
from pagoda.worker.forward_runner import ForwardRunner, Programs
from tests.cached_models import cached_model
from tests.device_under_test import DeviceUnderTest
from tests.models.tiny_encoders import states

TEXTS = [
    "The cat sits on the mat.",
    "A feline is resting on a rug.",
    "Stock markets fell sharply on Tuesday after the central bank raised its rates.",
    "",
    "¿Dónde está la biblioteca? Übermäßig, naïve, 東京, 👩‍🚀",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
    "Photosynthesis converts light into chemical energy. " * 20,
]


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_vectors_are_those_of_sentence_transformers(kernels: str, on: DeviceUnderTest) -> None:
    from sentence_transformers import SentenceTransformer

    files = cached_model("minilm-l6")
    theirs = SentenceTransformer(str(files.path), device="cpu")
    tokenizer = load_tokenizer(files)
    rows = [list(tokenizer.encode(text)) for text in TEXTS]
    assert rows == [theirs.tokenizer(text)["input_ids"] for text in TEXTS]
    ops = on.ops(kernels)
    model = load_model(files, ops, torch.float32, on.device)
    plan = model.pooling
    assert (plan.kind, plan.normalize, plan.max_seq_length) == (PoolingKind.MEAN, True, 256)
    forward = ForwardRunner(model, ops, recorder=Programs(ops) if isinstance(ops, NativeOps) else None)
    pooled = torch.stack([part.mean(0) for part in states(forward, rows, on.device)]).to(on.device)
    ours = torch.nn.functional.normalize(forward.embed(pooled, torch.float32).cpu(), dim=1)
    torch.testing.assert_close(ours, theirs.encode(TEXTS, convert_to_tensor=True), atol=1e-5, rtol=1e-5)
