"""The `usage` object."""

from typing import Any

from pagoda.server.generation import Generation


def usage_of(generation: Generation) -> dict[str, Any]:
    """Return the token counts of a generation so far."""
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
