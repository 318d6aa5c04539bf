"""The token counts of a generation so far."""

from pagoda.server.answers import PromptTokensDetails, Usage
from pagoda.server.generation import Generation


def usage_of(generation: Generation) -> Usage:
    """Return the token counts of a generation so far."""
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    return Usage(prompt, output, prompt + output, PromptTokensDetails(generation.num_cached_tokens))
