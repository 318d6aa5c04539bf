"""The element types of weights, activations and the KV cache."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}

QUANTIZATIONS = ("int8", "fp8", "gguf", "awq", "gptq", "compressed-tensors", "mxfp4")
"""How weights may be held: made of floats while loading, or the codes of a checkpoint (loading/quantization.py)."""

WITH_SCALES = ("int8", "fp8")
"""Types of a KV cache that keep a scale per token and head."""
