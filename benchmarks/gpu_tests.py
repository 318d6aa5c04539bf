"""The tests of numbers as parts of a measurement on a GPU."""

import os
import sys
from importlib.util import find_spec

FILES = (
    "kernels/test_triton",
    "kernels/test_triton_linear",
    "kernels/test_triton_rows",
    "kernels/test_shared_prefix",
    "kernels/test_ops",
    "kernels/test_op_table",
    "kernels/test_attention",
    "kernels/test_attention_memory",
    "kernels/test_bidirectional",
    "kernels/test_device_blocks",
    "kernels/test_constraints",
    "kernels/test_sampling",
    "kernels/test_linear",
    "kernels/test_moe",
    "kernels/test_low_rank",
    "kernels/test_int4_products",
    "kernels/test_far_memory",
    "kernels/test_select",
    "worker/test_gpu_memory",
    "worker/test_launch_ahead",
    "worker/test_cache_engine",
    "worker/test_staging",
    "worker/test_model_runner",
    "worker/test_sampler",
    "worker/test_followers",
    "models/test_parity",
    "models/test_mxfp4",
    "models/test_vision_towers",
    "models/test_stages",
    "models/test_triton_models",
    "models/test_gguf_models",
    "models/test_packed_checkpoints",
    "models/test_mixed_experts",
    "models/test_kv_of_two_shapes",
    "models/test_lora_parity",
    "models/test_prompt_embeds",
    "models/test_encoders",
    "engine/test_batch_invariance",
    "engine/test_triton_forms",
    "engine/test_schedules_agree",
    "engine/test_structured_output",
    "engine/test_beams_with_grammars",
    "engine/test_lora",
    "engine/test_sampling_ends",
    "engine/test_prompt_adapters",
    "engine/test_prompt_embeds",
    "engine/test_pooling",
    "engine/test_pooling_adapters",
    "engine/test_encoders",
    "engine/test_rerankers",
)
"""Below tests/, without .py: what others rest on comes first."""

NO_TESTS = 5
"""pytest's exit status where none was selected."""

_MOST_PROCESSES = 8


def command_of(file: str, device: str, is_slow: bool) -> list[str]:
    """Return the command that runs the quick tests of a file, or the slow ones."""
    kind = "slow" if is_slow else "not slow"
    command = [sys.executable, "-m", "pytest", "-q", "--device", device, "-m", kind, f"tests/{file}.py"]
    # Most of the time goes to compiling kernels, each on one core. A GPU's memory is measured by one process alone.
    processes = min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2)
    if device == "cuda" and processes > 1 and file != "worker/test_gpu_memory" and find_spec("xdist"):
        command += ["-n", str(processes)]
    return command
