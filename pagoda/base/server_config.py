"""The settings of the HTTP server, documented where they are declared (see pagoda.base.config)."""

import ipaddress
from dataclasses import dataclass, field
from typing import Annotated, Any

from pagoda.base.lora import LoRASources
from pagoda.base.setting import Setting
from pagoda.process.logs import FORMATS, LEVELS

MAX_HELD_BODY_BYTES = 256 * 2**20
"""The most bytes of request bodies that a server holds at once; further requests get 429."""
MAX_UPLOAD_BYTES = 512 * 2**20
"""The largest file that /v1/files takes. It goes to disk as it comes."""
MAX_HELD_MEDIA_BYTES = 512 * 2**20
"""The most bytes of processed images and audio of unfinished requests; further ones get 429, sounds after a wait."""
MAX_HELD_LOGPROBS = 8_388_608
"""The most log-probabilities that unfinished requests may come to together; further ones get 429."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What clients may send and hold at once. 0 disables a limit where its text says so."""

    max_queued_requests: Annotated[
        int,
        Setting(
            "Maximum requests that wait for their first token; further ones wait in line, then get 429 (0: no limit).",
            at_least=0,
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        Setting(
            "Maximum prompt plus expected output tokens of all requests; further ones wait in line (0: no limit).",
            at_least=0,
        ),
    ] = 2_000_000
    max_requests_per_key: Annotated[
        int, Setting("Maximum concurrent requests per API key (0: no limit).", at_least=0)
    ] = 0
    requests_per_minute_per_key: Annotated[
        int, Setting("Maximum requests per minute per API key (0: no limit).", at_least=0)
    ] = 0
    max_body_bytes: Annotated[
        int, Setting("Maximum size of a request body in bytes; larger ones get 413.", at_least=1, is_size=True)
    ] = 16 * 2**20
    max_models_memory: Annotated[
        int | None,
        Setting(
            "Maximum memory of the models that are loaded, where there are several; the others wait, or make room.",
            unset="what is free at the start",
            at_least=1,
            is_size=True,
            flat=True,
        ),
    ] = None
    max_connections: Annotated[
        int, Setting("Maximum open connections; further connections get 503 (0: no limit).", at_least=0)
    ] = 4096


@dataclass(frozen=True, slots=True)
class ServerTimeouts:
    """How long the server waits, in seconds. 0 disables a timeout where its text says so."""

    drain_timeout_s: Annotated[float, Setting("Time for running requests to finish after SIGTERM.", at_least=0)] = 30.0
    queue_timeout_s: Annotated[
        float,
        Setting(
            "About how long a request beyond the limits waits in line for its turn, before it gets 429 (0: at once).",
            at_least=0,
        ),
    ] = 10.0
    step_timeout_s: Annotated[
        float,
        Setting(
            "Restart an engine that for this long neither ends a step nor uses the processor (one that uses it: 10 "
            "times as long; 0: never), and an API process that does not answer.",
            at_least=0,
        ),
    ] = 120.0


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """What the server proves its identity with."""

    ssl_certfile: Annotated[str | None, Setting("TLS certificate, a PEM file.", unset="plain HTTP", flat=True)] = None
    ssl_keyfile: Annotated[str | None, Setting("TLS key, a PEM file.", unset="read from ssl_certfile", flat=True)] = (
        None
    )


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What is logged, on standard error."""

    access_log: Annotated[bool, Setting("Log one line per request.", flat=True)] = True
    log_level: Annotated[str, Setting("Lowest level of the lines that are logged.", words=LEVELS, flat=True)] = "info"
    log_format: Annotated[str, Setting("Form of the log's lines.", words=FORMATS, flat=True)] = "text"
    trace: Annotated[
        str | None,
        Setting(
            "File for a trace of the engines in Chrome's format, written when the server ends.",
            unset="no trace",
            flat=True,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """What holds where a request does not say."""

    enable_force_include_usage: Annotated[
        bool,
        Setting(
            "Send token counts with every stream: at its end, and in each chunk if it has no stream_options.", flat=True
        ),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Setting('Write tokens in log-probabilities as "token_id:ID".', flat=True)
    ] = False
    default_chat_template_kwargs: Annotated[
        dict[str, Any], Setting("Variables of the chat template.", unset="none", flat=True)
    ] = field(default_factory=dict[str, Any])
    history: Annotated[
        str,
        Setting(
            "Where the tokens of answers are kept, for the next turn to find them in the prefix cache: memory, off, or "
            "a file.",
            flat=True,
        ),
    ] = "memory"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server (docs/internals/server.md)."""

    models: Annotated[
        tuple[str, ...],
        Setting(
            "Another model to serve: a name, or a TOML or YAML file with a table of settings for each of several.",
            unset="one model",
        ),
    ] = ()
    host: Annotated[str, Setting("Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int | None,
        Setting("Port to listen on (0: any free port).", at_least=0, unset="8000, or Ollama's 11434 with --ollama"),
    ] = None
    uds: Annotated[str | None, Setting("Unix socket to listen on, instead of host and port.", unset="TCP")] = None
    api_server_count: Annotated[
        int, Setting("Processes that serve HTTP, on the same port and before the same engine.", at_least=1)
    ] = 1
    data_parallel_size: Annotated[
        int,
        Setting(
            "Replicas of the model, each with an engine of its own that computes on its share of the cores or on its "
            "own GPUs; requests of one that is killed continue on the others.",
            at_least=1,
        ),
    ] = 1
    root_path: Annotated[
        str, Setting("Path at which a proxy shows this server; routes work below it, too.", unset="none")
    ] = ""
    forwarded_allow_ips: Annotated[
        tuple[str, ...],
        Setting("Address or network of a proxy whose X-Forwarded-For names the client in the log, or * for any."),
    ] = ("127.0.0.1", "::1")
    api_keys: Annotated[
        tuple[str, ...], Setting("Key that clients must send.", unset="no key needed", is_secret=True)
    ] = ()
    api_key_file: Annotated[
        str | None,
        Setting("File with keys that clients may send, one per line; `ps` does not show them.", unset="none"),
    ] = None
    admin_api_key: Annotated[
        str | None,
        Setting(
            "Key required for operations (resetting caches, aborting other keys' requests); valid for all routes.",
            unset="any API key",
            is_secret=True,
        ),
    ] = None
    responses_file: Annotated[
        str | None,
        Setting(
            "File that keeps responses and conversations over restarts; files and batches are in a folder next to it.",
            unset="they end with the server",
        ),
    ] = None
    tls: Annotated[TLSFiles, Setting("Certificate and key of HTTPS.")] = field(default_factory=TLSFiles)
    cors_origins: Annotated[
        tuple[str, ...],
        Setting(
            "Origin whose pages in a browser may use the server (https://NAME, an app's app://NAME, or * for any).",
            unset="only the server's own pages",
        ),
    ] = ()
    tool_call_parser: Annotated[
        str,
        Setting(
            "Tool calls: auto (by template), none, or a format: hermes, pythonic, harmony, ... "
            "The answer to an unknown name has them all."
        ),
    ] = "auto"
    strict_fields: Annotated[
        bool, Setting("Refuse requests with unknown fields, instead of ignoring those with a log line and a header.")
    ] = False
    ollama: Annotated[bool, Setting("Answer Ollama's API, too: its routes are below /api.")] = False
    answer_defaults: Annotated[AnswerDefaults, Setting("What holds where a request does not say.")] = field(
        default_factory=AnswerDefaults
    )
    trust_request_chat_template: Annotated[bool, Setting("Accept chat templates in requests.")] = False
    lora_sources: Annotated[LoRASources, Setting("Where the server's LoRA adapters come from.")] = field(
        default_factory=LoRASources
    )
    server_limits: Annotated[ServerLimits, Setting("What clients may send and hold at once.")] = field(
        default_factory=ServerLimits
    )
    server_timeouts: Annotated[ServerTimeouts, Setting("How long the server waits, in seconds.")] = field(
        default_factory=ServerTimeouts
    )
    logs: Annotated[LogOptions, Setting("What is logged, on standard error.")] = field(default_factory=LogOptions)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        return is_address(self.host) and ipaddress.ip_address(self.host).is_loopback

    @property
    def trusted_proxies(self) -> list[str]:
        """`forwarded_allow_ips`, each of which may be several with commas between them, as uvicorn has it."""
        given = [one.strip() for several in self.forwarded_allow_ips for one in several.split(",")]
        return ["*"] if "*" in given else given


def is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
