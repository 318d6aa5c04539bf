"""OpenVINO GenAI, continuous batching. usage: openvino_peer.py EXPORTED_DIR WORKLOAD.json"""

import sys

import numpy as np
import openvino as ov
import openvino_genai as genai
from common import measure, read_work


def greedy(pipeline: "genai.ContinuousBatchingPipeline", num_tokens: int) -> "genai.GenerationConfig":
    config = pipeline.get_config()  # the model's own end-of-text token must be in it, though it is ignored
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def main() -> None:
    work = read_work(sys.argv[2])
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_seqs = max(8, len(work))
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {})
    pipeline.generate([ov.Tensor(np.arange(10, 40, dtype=np.int64)[None])], [greedy(pipeline, 8)])
    prompts = [ov.Tensor(np.array([request["prompt_token_ids"]], np.int64)) for request in work]
    configs = [greedy(pipeline, request["max_tokens"]) for request in work]
    measure("openvino", work, lambda: sum(len(o.m_generation_ids[0]) for o in pipeline.generate(prompts, configs)))


if __name__ == "__main__":
    main()
