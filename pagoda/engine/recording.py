"""Record what a scheduler was asked, decided and was told, one JSON line per call, so that `replay` can run it again.

    {"op": "begin", ...}    the settings that the scheduler was made with
    {"op": "add", ...}      a request: its parameters and its prompt, as made-up tokens
    {"op": "finish" | "finish_sequence" | "reset", ...}
    {"op": "schedule", "digest", "events"}    what was decided
    {"op": "update" | "fail", ...}            what the step gave: tokens as made up, seconds, rows that failed
    {"op": "full"}          the file has its largest size: nothing follows

A made-up token is a keyed hash of the real one and all before it, with a key that is thrown away: texts cannot be told
from them, but equal beginnings stay equal, and so do blocks that requests share. Ids of requests become r1, r2, …
"""

import hashlib
import secrets
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pagoda.base.clock import Clock
from pagoda.base.config import CacheConfig
from pagoda.base.errors import ConfigError
from pagoda.core.decision_log import DecisionLog
from pagoda.core.events import Event, Fold
from pagoda.core.kv import KVGroupSpec
from pagoda.core.request import Request, RequestStatus
from pagoda.core.scheduler_interface import SchedulerInterface
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from pagoda.core.stats import SchedulerStats
from pagoda.core.view import SchedulerView

VERSION = 1
MAX_BYTES = 256 << 20
_UNSAID = ("time_s", "request_id", "message", "stop_reason")
"""Fields of events that differ between runs, or name what callers sent."""


def described(event: Event) -> list[Any]:
    """Return what a run and its replay must agree on, as JSON has it."""
    fields = {name for kind in type(event).__mro__ for name in getattr(kind, "__slots__", ())}
    values = {name: getattr(event, name) for name in sorted(fields) if name not in _UNSAID}
    return [type(event).__name__, msgspec.json.decode(msgspec.json.encode(values, enc_hook=str))]


def digest_of(output: SchedulerOutput) -> list[int]:
    """Return rows, tokens, and a checksum of what a step computes in which blocks."""
    digest = 0
    tables = [table for init in output.admitted for table in init.block_ids]
    delta, moves = output.block_delta, (output.swap_out, output.swap_in, output.copies, output.released)
    arrays = (output.rows, output.start, output.num_new, output.sample_rows, delta.block_ids, *moves, *tables)
    for array in arrays:
        digest = zlib.crc32(np.ascontiguousarray(array).tobytes(), digest)
    return [len(output.rows), output.total_num_scheduled_tokens, digest]


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """What a scheduler is made with. The seed of the prefix cache's hashes is left out: it may be a secret."""

    options: SchedulerOptions
    cache: CacheConfig
    kv_groups: tuple[KVGroupSpec, ...]
    num_blocks: int
    max_model_len: int
    num_host_blocks: int = 0
    encoder_decoder: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", replace(self.options, prefix_hash_seed=0))


def _end_tokens(request: Request) -> tuple[int, ...]:
    return request.eos_token_ids + (request.sampling.stop_token_ids if request.sampling is not None else ())


class RecordingScheduler:
    """A scheduler that does as `inner` does, and writes each call to `path`, which must not exist.

    settings: what `inner` was made with.   with_tokens: real tokens in place of made-up ones.
    """

    def __init__(
        self,
        inner: SchedulerInterface,
        path: Path,
        clock: Clock,
        settings: RecordedSettings,
        *,
        with_tokens: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._inner, self._clock = inner, clock
        self._file = path.open("xb")
        self._left = max_bytes
        self._key, self._with_tokens = secrets.token_bytes(16), with_tokens
        self._labels: dict[str, str] = {}
        self._num_requests = 0
        self._requests: dict[str, Request] = {}
        self._prompts: dict[str, list[bytes]] = {}  # hashes: see _append
        self._outputs: dict[tuple[str, int], list[bytes]] = {}
        self._rows: dict[int, tuple[str, int]] = {}
        self._owners: dict[int, list[tuple[str, int]]] = {}  # by step in flight, of its samples
        self._events: list[list[Any]] = []
        self._unsubscribe = inner.subscribe(lambda event: self._events.append(described(event)))
        self._write("begin", version=VERSION, with_tokens=with_tokens, settings=msgspec.to_builtins(settings))

    def _write(self, op: str, **values: Any) -> None:
        if self._file.closed:
            return
        line = msgspec.json.encode({"op": op, "at": self._clock.now(), **values}) + b"\n"
        self._left -= len(line)
        if self._left < 0:
            line = b'{"op":"full"}\n'
        self._file.write(line)
        self._file.flush()
        if self._left < 0:
            self._unsubscribe()
            self._file.close()

    def _take_events(self) -> list[list[Any]]:
        taken, self._events[:] = self._events.copy(), []
        return taken

    # Made-up values

    def _hashed(self, *parts: bytes) -> bytes:
        return hashlib.blake2b(b"".join(parts), key=self._key, digest_size=8).digest()

    def _name(self, value: str | None) -> str | None:
        """Return a made-up name that is equal for equal names."""
        return value if value is None else self._hashed(value.encode()).hex()

    def _append(self, request: Request, states: list[bytes], before: bytes, tokens: Iterable[int]) -> list[int]:
        """Append the hashes of a text that goes on with these tokens. Return what stands for the tokens in the file.

        That is less than 2^22, the largest stop token, and odd for stop tokens alone: no other is taken for one.
        """
        shown: list[int] = []
        ends = _end_tokens(request)
        for token in tokens:
            before = self._hashed(before, token.to_bytes(8, "little"))
            states.append(before)
            made_up = (int.from_bytes(before, "little") >> 43) << 1 | (token in ends)
            shown.append(token if self._with_tokens else made_up)
        return shown

    # The scheduler

    def add_request(self, request: Request) -> None:
        self._inner.add_request(request)
        if self._file.closed:
            return
        self._num_requests += 1
        label = self._labels[request.request_id] = f"r{self._num_requests}"
        self._requests[label], states = request, list[bytes]()
        prompt = self._append(request, states, b"", request.prompt_token_ids.tolist())
        self._prompts[label] = states
        prior = [self._put(label, sequence, 0, list(tokens)) for sequence, tokens in enumerate(request.prior_output)]
        sampling, embeds = request.sampling, request.prompt_embeds
        self._write(
            "add",
            id=label,
            prompt=prompt,
            prior=prior,
            sampling=None
            if sampling is None
            else {
                name: getattr(sampling, name)
                for name in ("n", "max_tokens", "min_tokens", "ignore_eos", "prompt_logprobs")
            },
            arrival_time_s=request.arrival_time_s,
            priority=request.priority,
            client_index=request.client_index,
            handle=request.handle,
            lora=self._name(repr(request.lora.identity)) if request.lora is not None else None,
            cache_salt=self._name(request.cache_salt),
            skip_prefix_read=request.skip_prefix_read,
            media=[[self._name(item.content_hash), item.offset, item.length] for item in request.media],
            encoder_len=request.encoder_len,
            embeds=None if embeds is None else [len(embeds), self._name(embeds.tobytes().hex())],
            unsupported=request.is_beam_search,
            events=self._take_events(),
        )

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus) -> dict[int, EngineCoreOutputs]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        outputs = self._inner.finish_requests(ids, status)
        labels = [self._labels[one] for one in ids if one in self._labels]
        self._write("finish", ids=labels, status=status.name, events=self._take_events())
        return outputs

    def finish_sequence(self, request_id: str, index: int, status: RequestStatus) -> dict[int, EngineCoreOutputs]:
        outputs = self._inner.finish_sequence(request_id, index, status)
        label = self._labels.get(request_id, "")
        self._write("finish_sequence", id=label, index=index, status=status.name, events=self._take_events())
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self._inner.has_unfinished_requests()

    def schedule(self) -> SchedulerOutput:
        output = self._inner.schedule()
        if self._file.closed:
            return output
        for row in output.released.tolist():
            self._rows.pop(row, None)
        for init in output.admitted:
            self._rows[init.row] = (self._labels[init.request_id], init.sequence)
        for fork in output.forks:
            self._rows[fork.dst] = (self._rows[fork.src][0], fork.sequence)
        self._owners[output.step] = [self._rows[row] for row in output.sample_rows.tolist()]
        self._write("schedule", step=output.step, digest=digest_of(output), events=self._take_events())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput | None
    ) -> dict[int, EngineCoreOutputs]:
        outputs = self._inner.update_from_output(scheduler_output, model_output)
        if self._file.closed:
            return outputs
        result = self._result(scheduler_output, model_output) if model_output is not None else None
        self._write("update", step=scheduler_output.step, result=result, events=self._take_events())
        return outputs

    def fail_step(self, scheduler_output: SchedulerOutput, message: str) -> dict[int, EngineCoreOutputs]:
        outputs = self._inner.fail_step(scheduler_output, message)
        self._write("fail", step=scheduler_output.step, events=self._take_events())
        return outputs

    def _result(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, Any]:
        """Return a step's results, and which of its made-up tokens end the output of their request."""
        owners = self._owners.pop(output.step)
        ends = (output.start + output.num_new)[output.sample_index].tolist()
        sampled: list[list[int]] = []
        endings: list[tuple[str, int]] = []
        for (label, sequence), end, row, tokens, count in zip(
            owners,
            ends,
            output.rows[output.sample_index].tolist(),
            result.sampled.tolist(),
            result.num_sampled.tolist(),
            strict=True,
        ):
            request = self._requests[label]
            made_up = self._put(label, sequence, end - len(output.drafts.get(row, ())), tokens[:count])
            sampled.append(made_up)
            for token, value in zip(tokens[:count], made_up, strict=True):
                if token in _end_tokens(request):
                    kind = "eos" if token in request.eos_token_ids else "stop"
                    endings.append((f"{kind} {label}", value))
        return {
            "sampled": sampled,
            "ends": endings,
            "pooled": list(result.pooled),
            "failed": list(result.failed),
            "refused": sorted(result.refused),
            "duration_s": result.duration_s,
            "swap_s": result.swap_s,
            "drafts": {str(row): len(tokens) for row, tokens in result.drafts.items()},
        }

    def _put(self, label: str, sequence: int, position: int, tokens: list[int]) -> list[int]:
        """Note that the sequence has these tokens from `position` on. Return them as made up."""
        prompt, output = self._prompts[label], self._outputs.setdefault((label, sequence), [])
        at = max(position - len(prompt), 0)
        del output[at:]
        return self._append(self._requests[label], output, output[-1] if output else prompt[-1], tokens)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        done = self._inner.reset_prefix_cache(preempt_running)
        self._write("reset", preempt_running=preempt_running, events=self._take_events())
        return done

    # Questions

    def subscribe(self, fold: Fold, *, cache: bool = False) -> Callable[[], None]:
        return self._inner.subscribe(fold, cache=cache)

    def make_stats(self) -> SchedulerStats:
        return self._inner.make_stats()

    def view(self) -> SchedulerView:
        return self._inner.view()

    @property
    def explain(self) -> DecisionLog:
        return self._inner.explain


def record_scheduler(
    inner: SchedulerInterface, path: str, clock: Clock, settings: RecordedSettings, *, with_tokens: bool
) -> RecordingScheduler:
    """Return a scheduler that records to a new file. An engine that starts again takes the next free PATH.1, PATH.2, …

    Raises ConfigError if there can be no such file.
    """
    for number in range(100):
        try:
            file = Path(path if not number else f"{path}.{number}")
            return RecordingScheduler(inner, file, clock, settings, with_tokens=with_tokens)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"record={path!r} cannot be written ({error}); name a file in a folder that is"
            ) from error
    raise ConfigError(f"record={path!r} exists, and so do {path}.1 to {path}.99: remove them, or name another file")
