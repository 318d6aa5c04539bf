"""A worker without a model that knows what every KV slot ought to hold.

It applies each SchedulerOutput the way a real worker does, but where a real one writes keys and values, this one writes
the *name* of what they are computed from: the group, and the row's tokens up to that position. Before a row samples it
looks at every position that the row attends to. A block given out twice, a copy that was not made, a swap in the wrong
order or a block reused under a step in flight all show up as a wrong name, at the step where they happen.

Sampled tokens depend on the row's seed and tokens alone, so that any schedule must give the same text.

A step may be told to fail, as a whole or in some rows. What those rows should have written is then SPOILED; a row that
reads it writes the same, and samples GARBAGE: results that a client must never get.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

from pagoda.core.kv import KVGroupKind, KVGroupSpec
from pagoda.core.request import MediaItem, RequestKey, num_beam_candidates
from pagoda.core.scheduler_output import LogprobColumns, ModelRunnerOutput, RowInit, SchedulerOutput

Name = tuple[object, ...]
SPOILED: Name = ("spoiled",)
GARBAGE = 99


class WrongMemory(AssertionError):
    """A row would have read or written what is not its own."""


def next_token(seed: int, tokens: list[int], vocab: int) -> int:
    """The token that the model samples after `tokens`."""
    return zlib.crc32(np.asarray([seed, *tokens], np.int64).tobytes()) % vocab


def pooled_vector(tokens: list[int]) -> list[int]:
    """What the model makes of a whole prompt that is pooled."""
    return [zlib.crc32(np.asarray(tokens, np.int64).tobytes()) % 65521, len(tokens)]


def logprobs_after(tokens: list[int], vocab: int) -> np.ndarray:
    """What the model says of every token after `tokens`: float32 [vocab]. Not normalised; beams do not need it."""
    codes = [zlib.crc32(np.asarray([*tokens, token], np.int64).tobytes()) for token in range(vocab)]
    return -np.array([code % 1009 for code in codes], np.float32) / 256


@dataclass
class Row:
    """A row as the worker knows it.   num_logprobs: most likely tokens that it returns; 0 for none.

    is_pooled: it gives a vector when its prompt is computed, and no tokens.
    """

    request_id: str
    seed: int
    tokens: list[int]
    tables: list[list[int]]
    lora: object
    media: tuple[MediaItem, ...]
    encoder_len: int
    num_prompt: int
    cross_written: bool = False
    names: list[Name] = field(default_factory=list)  # of KV at each position
    num_logprobs: int = 0
    is_pooled: bool = False
    embeds: dict[int, bytes] = field(default_factory=dict)  # by position

    def name_at(self, position: int, tokens: list[int]) -> Name:
        """What the KV at `position` is computed from: the prefix before it, and the token or media there."""
        del self.names[position:]
        for place in range(len(self.names), position + 1):
            before: Name = self.names[-1] if self.names else ("root", self.lora, self.encoder_len and self.media)
            self.names.append((hash(before), self._thing_at(place, tokens)))
        return self.names[position]

    def _thing_at(self, position: int, tokens: list[int]) -> object:
        if not self.encoder_len:
            for item in self.media:
                if item.offset <= position < item.offset + item.length:
                    return item.content_hash, position - item.offset
        return self.embeds.get(position, tokens[position])


class ExactWorker:
    """Executes steps at once and in order. `num_blocks`: usable device blocks of all pools; block 0 is the null block.

    samples: otherwise it knows only the tokens that steps name.
    """

    def __init__(
        self,
        groups: tuple[KVGroupSpec, ...],
        block_size: int,
        num_blocks: int,
        num_host_blocks: int,
        vocab: int,
        *,
        samples: bool = True,
    ) -> None:
        self.samples = samples
        self.groups = groups
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.vocab = vocab
        self.device: dict[int, list[Name | None]] = {block: [None] * block_size for block in range(1, num_blocks + 1)}
        self.host: dict[int, list[Name | None]] = {}
        self.rows: dict[int, Row] = {}
        self.encoded: set[str] = set()
        self.given: set[str] = set()  # items whose features came, and whose outputs were not freed
        self.lost: set[str] = set()  # encoder outputs whose run failed
        self.ids: dict[RequestKey, str] = {}
        self.pooled_from: dict[str, tuple[int, int]] = {}  # request -> positions whose states it has, begin and end
        self.last_step = 0
        self.spoiled_rows: set[int] = set()  # of the step that runs

    def run(
        self, output: SchedulerOutput, failed: set[int] | None = None, *, raises: bool = False
    ) -> ModelRunnerOutput:
        """Apply and execute one step, of which the rows `failed` cannot be computed; all of them, if it raises."""
        if output.step != self.last_step + 1:
            raise WrongMemory(f"step {output.step} came after step {self.last_step}")
        self.last_step = output.step
        for row in output.released.tolist():
            if self.rows.pop(row, None) is None:
                raise WrongMemory(f"row {row} was released but is not known")
        self._move_blocks(output)
        for init in output.admitted:
            self._admit(init)
        self._apply_decided(output)
        self._apply_beams(output)
        self._apply_delta(output)
        for fork in output.forks:
            self._fork(fork.src, fork.dst, fork.seed)
        for key in output.finished:
            self.pooled_from.pop(self.ids.get(key, ""), None)
        for item in output.encoder_freed:
            self.given.discard(item)
            self.encoded.discard(item)
            self.lost.discard(item)
        for item in output.encoder_inputs:
            if item.content_hash in self.given:
                raise WrongMemory(f"item {item.content_hash} is sent twice")
            self.given.add(item.content_hash)
        for run in output.encoder_runs:
            if run.content_hash not in self.given:
                raise WrongMemory(f"item {run.content_hash} was not sent")
            if run.content_hash in self.encoded:
                raise WrongMemory(f"item {run.content_hash} is encoded twice")
            if raises:
                self.lost.add(run.content_hash)
            elif not any(row.encoder_len for row in self.rows.values()):
                self.encoded.add(run.content_hash)
        self.spoiled_rows = {*output.rows.tolist(), *output.sample_rows.tolist()} if raises else set(failed or ())
        fed = self._write(output, raises=raises)
        self._read(output)
        return self._sample(output, fed)

    def _move_blocks(self, output: SchedulerOutput) -> None:
        for source, target in output.swap_out.tolist():
            if not 0 <= target < self.num_host_blocks + 1:
                raise WrongMemory(f"host block {target} does not exist")
            self.host[target] = list(self.device[source])
        for source, target in output.swap_in.tolist():
            self.device[target] = list(self.host[source])
        targets = output.copies[:, 1].tolist()
        if len(set(targets)) != len(targets) or set(targets) & set(output.copies[:, 0].tolist()):
            raise WrongMemory(f"copies get in each other's way: {output.copies.tolist()}")
        for source, target in output.copies.tolist():
            self.device[target] = list(self.device[source])

    def _admit(self, init: RowInit) -> None:
        if init.row in self.rows:
            raise WrongMemory(f"row {init.row} of {init.request_id} is given to a second owner")
        self.ids[init.key] = init.request_id
        tables = [table.tolist() for table in init.block_ids]
        row = Row(
            init.request_id,
            init.seed,
            init.token_ids.tolist(),
            tables,
            init.lora and (init.lora.digest or (init.lora.name, init.lora.path)),
            init.media,
            init.encoder_len,
            init.num_prompt_tokens,
        )
        row.cross_written = init.num_computed > 0
        row.is_pooled = init.pooling is not None
        if init.prompt_embeds is not None:
            given = init.prompt_embeds
            row.embeds = {at: one.tobytes() for at, one in zip(given.positions.tolist(), given.values, strict=True)}
        if init.sampling is not None and init.sampling.beam_search is not None:
            row.num_logprobs = num_beam_candidates(init.sampling, init.eos_token_ids)
        self.rows[init.row] = row

    def _apply_decided(self, output: SchedulerOutput) -> None:
        """Take the tokens that the step names. The worker that sampled them has them."""
        decided = output.decided
        for number, position, token in zip(
            decided.rows.tolist(), decided.positions.tolist(), decided.tokens.tolist(), strict=True
        ):
            row = self.rows[number]
            known = row.tokens[position : position + 1]
            is_beam = row.num_logprobs > 0  # what it sampled itself does not count
            if position > len(row.tokens) or (self.samples and known != [token] and not is_beam):
                raise WrongMemory(f"{row.request_id} gets token {token} at {position}, where it has {known}")
            row.tokens[position : position + 1] = [token]

    def _apply_beams(self, output: SchedulerOutput) -> None:
        beams = output.beams
        for source, target in beams.copies:
            if source in {row for _, row in beams.copies}:
                raise WrongMemory(f"row {source} goes on as row {target}, but is overwritten itself")
            old, new = self.rows[source], self.rows[target]
            if old.request_id != new.request_id:
                raise WrongMemory(f"a beam of {old.request_id} goes on in a row of {new.request_id}")
            new.tokens, new.tables, new.names = list(old.tokens), [list(table) for table in old.tables], list(old.names)
        for row, position, token in zip(
            beams.rows.tolist(), beams.positions.tolist(), beams.tokens.tolist(), strict=True
        ):
            if len(self.rows[row].tokens) not in (position, position + 1):
                raise WrongMemory(f"row {row} gets a token at {position}, but has {len(self.rows[row].tokens)} tokens")
            self.rows[row].tokens[position:] = [token]

    def _apply_delta(self, output: SchedulerOutput) -> None:
        delta = output.block_delta
        for row, group, index, block in zip(
            delta.rows.tolist(), delta.groups.tolist(), delta.index.tolist(), delta.block_ids.tolist(), strict=True
        ):
            table = self.rows[row].tables[group]
            table.extend([0] * (index + 1 - len(table)))
            table[index] = block

    def _fork(self, source: int, target: int, seed: int) -> None:
        if target in self.rows:
            raise WrongMemory(f"row {target} is forked into but has an owner")
        old = self.rows[source]
        self.rows[target] = Row(
            old.request_id, seed, list(old.tokens), [list(table) for table in old.tables],
            old.lora, old.media, old.encoder_len, old.num_prompt, old.cross_written, list(old.names),
            old.num_logprobs,
        )  # fmt: skip
        self.rows[target].embeds = old.embeds

    def _write(self, output: SchedulerOutput, *, raises: bool) -> dict[int, list[int]]:
        """Write all KV of the step; the tokens each row was fed, drafts included."""
        written: dict[tuple[int, int], int] = {}
        fed: dict[int, list[int]] = {}
        for number, start, new in zip(
            output.rows.tolist(), output.start.tolist(), output.num_new.tolist(), strict=True
        ):
            row = self.rows[number]
            drafts = output.drafts.get(number)
            tokens = row.tokens + (drafts.tolist() if drafts is not None else [])
            if number in fed or new <= 0 or start + new > len(tokens):
                raise WrongMemory(
                    f"{row.request_id}: positions {start}..{start + new - 1} of {len(tokens)} known tokens"
                )
            fed[number] = tokens
            self._check_media(number, row, start, new)
            for group, spec in enumerate(self.groups):
                if spec.kind is KVGroupKind.CROSS:
                    self._write_cross(row, group)
                    continue
                if spec.kind is KVGroupKind.STATE and start:
                    self._read_state(number, row, group, row.name_at(start - 1, tokens))
                for position in range(start, start + new):
                    block, slot = self._written(row, group, position, start + new), self._slot(group, position)
                    if not block:
                        continue
                    if written.get((block, slot), number) != number:
                        raise WrongMemory(
                            f"rows {written[block, slot]} and {number} both write slot {slot} of block {block}"
                        )
                    written[block, slot] = number
                    name: Name = (group, row.name_at(position, tokens))
                    if spec.kind is KVGroupKind.STATE:  # it is all that the block holds
                        self.device[block] = [None]
                        name = SPOILED if number in self.spoiled_rows else name
                    self.device[block][slot] = name
        for number in self.spoiled_rows:
            self._spoil(output, number, raises=raises)
        return fed

    def _slot(self, group: int, position: int) -> int:
        """Where a block holds what `position` leaves: the states of its positions overwrite each other."""
        return 0 if self.groups[group].kind is KVGroupKind.STATE else position % self.block_size

    def _written(self, row: Row, group: int, position: int, end: int) -> int:
        """The block to which `position` of a row that computes up to `end` is written; 0: it leaves no state.

        The states of drafts go to the block after that of the last known token.
        """
        index = position // self.block_size
        if self.groups[group].kind is KVGroupKind.STATE:
            known = len(row.tokens)
            if position >= known:
                return self._block(row, group, ((known - 1) // self.block_size + 1) * self.block_size)
            if row.tables[group][index] == 0 and min(end, known) > (index + 1) * self.block_size:
                return 0
        return self._block(row, group, position)

    def _read_state(self, number: int, row: Row, group: int, name: Name) -> None:
        """Read the state in front of a row's chunk, in the order of the rows: a row before it may have just left it."""
        block = self._block(row, group, len(row.names) - 1)
        held = self.device[block][0]
        if held == SPOILED:
            self.spoiled_rows.add(number)
        elif held != (group, name):
            raise WrongMemory(
                f"{row.request_id} (row {number}) goes on from position {len(row.names) - 1} of group {group}, but "
                f"block {block} has the state {held}"
            )

    def _spoil(self, output: SchedulerOutput, number: int, *, raises: bool = False) -> None:
        """What the row writes in this step is wrong."""
        for at in np.flatnonzero(output.rows == number).tolist():
            start, row = int(output.start[at]), self.rows[number]
            for group, spec in enumerate(self.groups):
                if spec.kind is KVGroupKind.CROSS:
                    lost = raises and any(run.row == number for run in output.encoder_runs)
                    positions = range(row.encoder_len) if lost else range(0)
                else:
                    positions = range(start, start + int(output.num_new[at]))
                for position in positions:
                    if block := self._written(row, group, position, positions.stop):
                        self.device[block][self._slot(group, position)] = SPOILED

    def _write_cross(self, row: Row, group: int) -> None:
        if not row.cross_written:
            for place in range(row.encoder_len):
                self.device[self._block(row, group, place)][place % self.block_size] = self._cross_name(
                    row, group, place
                )
        if group == len(self.groups) - 1 or self.groups[group + 1].kind is not KVGroupKind.CROSS:
            row.cross_written = True

    @staticmethod
    def _cross_name(row: Row, group: int, place: int) -> Name:
        return group, "encoder", row.media, place

    def _check_media(self, number: int, row: Row, start: int, new: int) -> None:
        if row.encoder_len:
            return
        for item in row.media:
            if (
                item.offset < start + new
                and start < item.offset + item.length
                and item.content_hash not in self.encoded
            ):
                if item.content_hash in self.lost:
                    self.spoiled_rows.add(number)
                    continue
                raise WrongMemory(f"{row.request_id} needs {item.content_hash}, which is not encoded")

    def _block(self, row: Row, group: int, position: int) -> int:
        index = position // self.block_size
        table = row.tables[group]
        if index >= len(table) or table[index] == 0:
            raise WrongMemory(f"{row.request_id}: no block for position {position} of group {group}: {table}")
        return table[index]

    def _read(self, output: SchedulerOutput) -> None:
        """Look at all that rows attend to; a row that reads what is spoiled spoils what it writes."""
        before = -1
        while before != len(self.spoiled_rows):  # rows read what others write in the same step
            before = len(self.spoiled_rows)
            for number, start, new in zip(
                output.rows.tolist(), output.start.tolist(), output.num_new.tolist(), strict=True
            ):
                if number not in self.spoiled_rows and self._reads_spoiled(output.step, number, start, new):
                    self.spoiled_rows.add(number)
                    self._spoil(output, number)

    def _reads_spoiled(self, step: int, number: int, start: int, new: int) -> bool:
        row = self.rows[number]
        for group, spec in enumerate(self.groups):
            if spec.kind is KVGroupKind.STATE:
                continue  # it was read before it was overwritten
            is_cross = spec.kind is KVGroupKind.CROSS
            first = max(0, start - spec.window + 1) if spec.window else 0
            for position in range(row.encoder_len) if is_cross else range(first, start + new):
                block = self._block(row, group, position)
                held = self.device[block][position % self.block_size]
                if held == SPOILED:
                    return True
                expected = self._cross_name(row, group, position) if is_cross else (group, row.names[position])
                if held != expected:
                    raise WrongMemory(
                        f"step {step}: {row.request_id} (row {number}) reads position {position} of group {group} "
                        f"from block {block}, which holds {held}"
                    )
        return False

    def _sample(self, output: SchedulerOutput, fed: dict[int, list[int]]) -> ModelRunnerOutput:
        widest = 1 + max((len(drafts) for drafts in output.drafts.values()), default=0)
        sampled = np.full((len(output.sample_rows), widest), -1, np.int32)
        counts = np.zeros(len(output.sample_rows), np.int32)
        for place, (number, index) in enumerate(
            zip(output.sample_rows.tolist(), output.sample_index.tolist(), strict=True)
        ):
            row, source = self.rows[number], int(output.rows[index])
            if int(output.start[index]) + int(output.num_new[index]) != len(fed[source]):
                raise WrongMemory(f"{row.request_id} samples before its last token is computed")
            if source in self.spoiled_rows and self.samples:
                self.spoiled_rows.add(number)
                sampled[place, 0], counts[place] = GARBAGE, 1
                row.tokens = [*row.tokens, GARBAGE]
                continue
            if not self.samples:
                continue
            drafts = output.drafts.get(source)
            said = [next_token(row.seed, row.tokens, self.vocab)]
            for draft in drafts.tolist() if drafts is not None else []:
                if draft != said[-1]:
                    break
                said.append(next_token(row.seed, row.tokens + said, self.vocab))
            sampled[place, : len(said)] = said
            counts[place] = len(said)
            row.tokens = row.tokens + said
        columns = self._logprobs(output, counts) if self.samples else None
        pooled = self._pool(output)
        swap_s = 0.001 * (len(output.swap_in) + len(output.swap_out))
        duration_s = swap_s + 0.005 + 0.0005 * output.total_num_scheduled_tokens
        return ModelRunnerOutput(
            output.step, sampled, counts, logprobs=columns, pooled=pooled, duration_s=duration_s, swap_s=swap_s
        )

    def _pool(self, output: SchedulerOutput) -> dict[int, np.ndarray]:
        """Return the vectors of prompts that end, and after them from which position on their states were computed."""
        found: dict[int, np.ndarray] = {}
        for number, start, new in zip(
            output.rows.tolist(), output.start.tolist(), output.num_new.tolist(), strict=True
        ):
            row = self.rows[number]
            if not row.is_pooled:
                continue
            begin, end = self.pooled_from.get(row.request_id, (start, start))
            begin = begin if end == start else start
            self.pooled_from[row.request_id] = (begin, start + new)
            if start + new == row.num_prompt and number in self.spoiled_rows:
                found[number] = np.array([GARBAGE, GARBAGE, 0], np.float32)
            elif start + new == row.num_prompt:
                found[number] = np.array([*pooled_vector(row.tokens), begin], np.float32)
        return found

    def _logprobs(self, output: SchedulerOutput, counts: np.ndarray) -> LogprobColumns | None:
        """Of beams; they have no drafts. Other rows get zeros."""
        most = max((self.rows[row].num_logprobs for row in output.sample_rows.tolist()), default=0)
        if not most:
            return None
        total = int(counts.sum())
        ids, values = np.zeros((total, 1 + most), np.int32), np.zeros((total, 1 + most), np.float32)
        for row, at in zip(output.sample_rows.tolist(), (np.cumsum(counts) - counts).tolist(), strict=True):
            if self.rows[row].num_logprobs:
                logprobs = logprobs_after(self.rows[row].tokens[:-1], self.vocab)
                if row in self.spoiled_rows:
                    logprobs = -logprobs
                best = np.argsort(-logprobs, kind="stable")[:most]
                ids[at, 1:], values[at, 1:] = best, logprobs[best]
        return LogprobColumns(ids, values, np.zeros(total, np.int32))
