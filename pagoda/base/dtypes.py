"""The element types of weights, activations and the KV cache."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}

WITH_SCALES = ("int8", "fp8")
"""Types of a KV cache that keep a scale per token and head."""
