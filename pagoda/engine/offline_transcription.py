"""Offline transcription, as LLM does it: run the jobs of a list of sounds to their end."""

import logging
import queue
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tqdm import tqdm

from pagoda.base.errors import CapacityError, PagodaError, RequestError, fresh
from pagoda.base.outputs import RequestOutput, TranscriptionOutput
from pagoda.engine.offline import Mail, NewRequest, OfflineThread
from pagoda.engine.outputs.output_processor import OutputKind
from pagoda.engine.transcription.piece import Job
from pagoda.engine.transcription.transcriber import Transcription

logger = logging.getLogger("pagoda")

_MAX_HELD_BYTES = 2**30
_SOUND_BAR = "{desc}: {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} s [{elapsed}]"


class _Transcribing:
    """Sounds on their way to text: the jobs of each, and the requests that their questions have become.

    names: of the sounds, for errors.   outputs: of those that have ended, by index.   open: those that have begun.
    asked: the sound and the job of each running request.
    """

    def __init__(self, thread: OfflineThread, names: Sequence[str], priority: int, cache_salt: str | None) -> None:
        self._thread, self._names = thread, names
        self._priority, self._cache_salt = priority, cache_salt
        self._inputs = thread.engine.input_processor
        self._mail: Mail = queue.SimpleQueue()
        self._new: list[NewRequest] = []
        self._num_jobs: dict[int, int] = {}  # of each open sound
        self._waiting: deque[tuple[int, Job]] = deque()
        self.asked: dict[str, tuple[int, Job]] = {}
        self.open: dict[int, Transcription] = {}
        self.outputs: dict[int, TranscriptionOutput] = {}

    @property
    def has_room(self) -> bool:
        """Return whether another sound could run: as many requests run at once as sequences, of all sounds."""
        held_bytes = sum(one.num_bytes for one in self.open.values())
        return not self._waiting and self._has_place and held_bytes < _MAX_HELD_BYTES

    @property
    def _has_place(self) -> bool:
        return len(self.asked) < self._inputs.limits.max_num_seqs

    @property
    def done_s(self) -> float:
        """Return how many seconds of the sounds are done."""
        return sum(one.done_s for one in self.open.values()) + sum(one.duration for one in self.outputs.values())

    def start(self, index: int, sound: Transcription) -> None:
        """Begin to transcribe a sound, so that the engine computes while the next file is read."""
        self.open[index] = sound
        self._num_jobs[index] = 1
        self._waiting.append((index, sound.job()))
        self.submit()

    def submit(self) -> None:
        """Start as many jobs as have a place, and queue their requests. Raises the engine's error."""
        self._start_waiting()
        while self._new:
            new, self._new = self._new, []
            for request_id, error in self._thread.add(self._mail, new).items():
                if not isinstance(error, RequestError | CapacityError):
                    raise error
                if request_id in self.asked:
                    self.fail(self.asked[request_id][0], error)
            self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and self._has_place:
            index, job = self._waiting.popleft()
            if index in self.open:
                self._advance(index, job, None)

    def step(self) -> None:
        """Wait for some of all answers, and advance their jobs. All must be submitted. Raises the engine's error."""
        outputs = self._mail.get()
        assert outputs is not None
        if isinstance(outputs, PagodaError):
            raise fresh(outputs)
        for output in outputs:
            owner = self.asked.pop(output.request_id, None)
            if owner is None or not output.finished:
                continue
            index, job = owner
            if output.error is not None:
                self.fail(index, RequestError(output.error, "file"))
            else:
                self._advance(index, job, output)

    def _advance(self, index: int, job: Job, answer: RequestOutput | None) -> None:
        """Run a job until it asks the next question, or ends."""
        try:
            asked = job.send(answer) if answer is not None else next(job)
            if isinstance(asked, list):
                self._num_jobs[index] += len(asked)
                self._waiting.extend((index, one) for one in asked)
                self._advance(index, job, None)
                return
            request = self._inputs.make_request(
                self._thread.new_id(),
                asked.prompt,
                asked.params,
                arrival_time_s=self._thread.engine.core.now(),
                priority=self._priority,
                cache_salt=self._cache_salt,
            )
        except StopIteration:
            self._num_jobs[index] -= 1
            if not self._num_jobs[index]:
                self.outputs[index] = self.open.pop(index).output()
        except (RequestError, CapacityError) as error:
            self.fail(index, error)
        else:
            self.asked[request.request_id] = index, job
            self._new.append(NewRequest(request, OutputKind.FINAL_ONLY))

    def fail(self, index: int, error: RequestError | CapacityError) -> None:
        """End a sound. Raises `error` if there is no other."""
        if len(self._names) == 1:
            raise error
        logger.warning("%s is not transcribed: %s", self._names[index], error)
        self.outputs[index] = TranscriptionOutput(name=self._names[index], error=str(error))
        self.open.pop(index, None)
        of_sound = {request_id for request_id, (owner, _) in self.asked.items() if owner == index}
        self._new = [new for new in self._new if new.request.request_id not in of_sound]
        self.abort(of_sound)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort running requests."""
        if ids := list(request_ids):
            self._thread.abort(ids)
        for request_id in ids:
            del self.asked[request_id]


def transcribe_all(
    thread: OfflineThread,
    sounds: Sequence[Callable[[], Transcription]],
    names: Sequence[str],
    use_tqdm: bool,
    priority: int,
    cache_salt: str | None,
) -> list[TranscriptionOutput]:
    """Return an output for each sound, in their order; that of one that cannot be transcribed has `error` set.

    sounds: each reads its file when it is its turn: as many are open at once as sequences run, and as fit into
    _MAX_HELD_BYTES.   names: of the files.   priority, cache_salt: of their requests.
    Raises RequestError or CapacityError if there is only one.
    """
    waiting = deque(enumerate(sounds))
    disable = None if use_tqdm else True
    with thread.entered(), tqdm(total=0, desc="Sound", unit="s", disable=disable, bar_format=_SOUND_BAR) as bar:
        work = _Transcribing(thread, names, priority, cache_salt)
        try:
            while waiting or work.open:
                while waiting and work.has_room:
                    index, read = waiting.popleft()
                    try:
                        sound = read()
                    except (RequestError, CapacityError) as error:
                        work.fail(index, error)
                        continue
                    bar.total += round(sound.sound.duration_s)
                    work.start(index, sound)
                work.submit()
                if work.asked:
                    work.step()
                bar.n = round(work.done_s)
                bar.refresh()
        finally:
            work.abort(work.asked)
    return [work.outputs[index] for index in range(len(sounds))]
