"""OpenVINO GenAI, continuous batching. usage: openvino_peer.py EXPORTED_DIR WORKLOAD.json [BEAM_WIDTH]

With a width above 1, each request is a beam search, and the tokens of all its beams count.
"""

import sys

import numpy as np
import openvino as ov
import openvino_genai as genai
from common import measure, read_work


def config_of(
    pipeline: "genai.ContinuousBatchingPipeline", num_tokens: int, width: int = 1
) -> "genai.GenerationConfig":
    """Greedy decoding, or a beam search of that width, of exactly `num_tokens` tokens."""
    config = pipeline.get_config()  # the model's own end-of-text token must be in it, though it is ignored
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    if width > 1:
        config.num_beams = width
        config.num_return_sequences = width
    return config


def count_tokens(results: "list[genai.EncodedGenerationResult]") -> int:
    """Tokens of all the sequences."""
    return sum(len(sequence) for result in results for sequence in result.m_generation_ids)


def main() -> None:
    work = read_work(sys.argv[2])
    width = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_seqs = max(8, len(work) * width)
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {})
    pipeline.generate([ov.Tensor(np.arange(10, 40, dtype=np.int64)[None])], [config_of(pipeline, 8, width)])
    prompts = [ov.Tensor(np.array([request["prompt_token_ids"]], np.int64)) for request in work]
    configs = [config_of(pipeline, request["max_tokens"], width) for request in work]
    measure("openvino", work, lambda: count_tokens(pipeline.generate(prompts, configs)), sequences=width)


if __name__ == "__main__":
    main()
