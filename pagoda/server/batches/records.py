"""What is known of files and batches: as answers show it, and with what only the server needs."""

from msgspec import Struct

from pagoda.server.batches.usage import BatchUsage


class FileObject(Struct, kw_only=True):
    """A file.   bytes: its size.   created_at, expires_at: by time.time."""

    id: str
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class RequestCounts(Struct, kw_only=True):
    """Lines of a batch: all, those with an answer, and those that failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Progress(Struct, kw_only=True):
    """How far a batch is.   model, usage: of its answers, see Tally.   num_bytes: of them."""

    counts: RequestCounts
    model: str | None = None
    usage: BatchUsage | None = None
    num_bytes: int = 0


class BatchError(Struct, frozen=True):
    """Why a batch failed.   code: as of lines of the output.   line: of its input, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct):
    data: list[BatchError]
    object: str = "list"


class Batch(Struct, kw_only=True):
    """A batch.

    status: validating, in_progress, finalizing, completed, failed, expired, cancelling or cancelled.
    output_file_id, error_file_id: the answers, and the lines that failed, once it has ended; null if there are none.
    model: that gave the answers; null without any, or if several models did.   usage: tokens of the answers so far.
    """

    id: str
    object: str = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    model: str | None = None
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None

    def note(self, progress: Progress) -> None:
        """Take how far it is."""
        self.request_counts, self.model, self.usage = progress.counts, progress.model, progress.usage

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


class StoredFile(Struct, tag="file"):
    """A file of a key."""

    owner: str
    file: FileObject


class StoredBatch(Struct, tag="batch"):
    """A batch of a key.

    output_age_s: how long its output is kept.   client: the process that runs it; None: it waits.
    num_bytes: of its answers so far.
    """

    owner: str
    batch: Batch
    output_age_s: int
    client: int | None = None
    num_bytes: int = 0


class Upload(Struct, frozen=True):
    """What an upload may be written to, as a file of this id."""

    id: str
    path: str


class FileFound(Struct, frozen=True):
    """A file, and where its content is."""

    file: FileObject
    path: str


class Work(Struct, frozen=True):
    """A batch that a process is to run.   folder: of its files."""

    owner: str
    batch: Batch
    folder: str


class Ended(Struct, frozen=True):
    """How a batch has ended.

    progress: how far it came; None: as was noted last.   output_bytes, error_bytes: of its files; 0: there is none.
    """

    status: str
    progress: Progress | None = None
    output_bytes: int = 0
    error_bytes: int = 0
    errors: list[BatchError] = []
