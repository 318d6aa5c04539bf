"""Commands and flags of vLLM, llama.cpp and Ollama that pagoda does not have -> what to write instead."""

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {
    # vLLM
    "collect-env": "pagoda doctor",
    "complete": "pagoda generate",
    # Ollama
    "ls": "pagoda list",
    "cp": "pagoda serve MODEL --served-model-name NAME",
    "stop": "end the server with Ctrl-C or SIGTERM",
    "create": "pagoda serve MODEL with --chat-template and --override-generation-config",
    # llama.cpp
    "server": "pagoda serve",
    "cli": "pagoda run",
    "help": "pagoda --help",
    "version": "pagoda --version",
}
"""Commands -> the way that works here."""

_CONTEXT = "--max-model-len"
_LENGTH = "--max-tokens"
_PROMPT = "the prompt is a word of its own: pagoda run MODEL 'a question'"
_DEVICE = "all layers are on one device: --device"
_BATCH = "--max-num-batched-tokens"
_SEQUENCES = "--max-num-seqs"
_WORKLOAD = "--workload FILE, or random prompts with --num-prompts, --input-len and --output-len"
_IN_REQUEST = "structured_outputs of a request"

FLAGS: Mapping[str, str] = {
    # llama.cpp
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "-n": _LENGTH,
    "--n-predict": _LENGTH,
    "--predict": _LENGTH,
    "-p": _PROMPT,
    "--prompt": _PROMPT,
    "-f": "the prompt may come from standard input: pagoda run MODEL < FILE",
    "--file": "the prompt may come from standard input: pagoda run MODEL < FILE",
    "--temp": "--temperature",
    "-s": "--seed",
    "-t": "--threads",
    "-tb": "--threads",
    "--threads-batch": "--threads",
    "-b": _BATCH,
    "--batch-size": _BATCH,
    "-ub": _BATCH,
    "--ubatch-size": _BATCH,
    "-np": _SEQUENCES,
    "--parallel": _SEQUENCES,
    "-ngl": _DEVICE,
    "--n-gpu-layers": _DEVICE,
    "--gpu-layers": _DEVICE,
    "-dev": "--device",
    "-fa": "attention is always computed without its matrix; leave it out",
    "--flash-attn": "attention is always computed without its matrix; leave it out",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-sys": "--system",
    "--system-prompt": "--system",
    "-cnv": "pagoda chat",
    "--conversation": "pagoda chat",
    "-ctk": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "-md": "--speculative-config",
    "--model-draft": "--speculative-config",
    "--repeat-penalty": "--repetition-penalty",
    "--chat-template-file": "--chat-template FILE",
    "--jinja": "chat templates are always Jinja's; leave it out",
    "--mlock": "leave it out",
    "--no-mmap": "leave it out",
    "--grammar": _IN_REQUEST,
    "--grammar-file": _IN_REQUEST,
    "--json-schema": _IN_REQUEST,
    "--embedding": "a model of embeddings is recognised from its files; leave it out",
    "--embeddings": "a model of embeddings is recognised from its files; leave it out",
    "--reranking": "a reranker is recognised from its files; leave it out",
    "--lora": "--enable-lora, and --lora-modules NAME=FOLDER of pagoda serve",
    # vLLM
    "--quick": "pagoda run MODEL 'a question'",
    "--model-name": "--model",
    "--backend": "leave it out: bench serve measures any server of OpenAI's API at --base-url",
    "--endpoint-type": "leave it out: bench serve measures any server of OpenAI's API at --base-url",
    "--endpoint": "bench serve measures /v1/completions at --base-url",
    "--dataset-name": _WORKLOAD,
    "--dataset-path": _WORKLOAD,
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
    "--save-result": "--json, which prints the figures",
    "--headless": "a server on several machines is started on one of them: --distributed-executor-backend ray",
    # Ollama
    "--format": _IN_REQUEST,
    "--keepalive": "leave it out: a server keeps its only model, and of several those that fit in --max-models-memory",
    "--think": "chat_template_kwargs of a request; --default-chat-template-kwargs of pagoda serve",
}
"""Flags -> the flag here, or the way that works."""


def instead(word: str, among: Mapping[str, str]) -> str:
    """Return what to write instead of a command or a flag, as the end of an error; "" if it is not known."""
    if word not in among:
        return ""
    way = among[word]
    return f"; use {way}" if way.startswith(("--", "pagoda ")) else f"; {way}"
