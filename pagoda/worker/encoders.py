"""EncoderOutputs: runs a model's encoder for the steps' encoder inputs, and keeps what it gave by content."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from pagoda.core.request import MediaItem
from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.kernels.batch import AttentionMetadata, ForwardBatch, Input, OutputRows
from pagoda.kernels.transfer import parts_to_device
from pagoda.models.base import ENCODER_PIECE_TOKENS, Encoder, EncoderItem
from pagoda.worker.batch_rows import StepStates
from pagoda.worker.forward_runner import ForwardRunner
from pagoda.worker.staging import StepEmbeds


class EncoderOutputs:
    """Where the items of rows are that have not computed all of theirs, and outputs until the scheduler drops them."""

    def __init__(self, forward: ForwardRunner, dtype: torch.dtype, crosses: bool) -> None:
        """forward: of the encoder.   dtype: the compute type.

        crosses: the outputs are read by cross attention; False: they take the place of the items' tokens.
        """
        assert isinstance(forward.model, Encoder)
        self._encoder = forward.model
        self._forward, self._dtype, self._crosses = forward, dtype, crosses
        self._items: dict[int, tuple[MediaItem, ...]] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._lacking: set[str] = set()  # of steps that raised before they were computed
        self.num_computed = 0
        """Items that the encoder has computed so far."""

    def apply(self, output: SchedulerOutput) -> None:
        """Apply a step's events. A fork needs nothing: its prompt is computed."""
        for row in output.released.tolist():
            self._items.pop(row, None)
        for init in output.admitted:
            self._items.pop(init.row, None)
            if init.media and (self._crosses or init.num_computed < _end(init.media)):
                self._items[init.row] = init.media
        for content_hash in output.encoder_freed:
            self._outputs.pop(content_hash, None)
            self._lacking.discard(content_hash)
        if not output.is_empty:  # until `run`; of an empty step that raises, the scheduler drops no output
            self._lacking.update(item.content_hash for item in output.encoder_inputs)

    def run(self, output: SchedulerOutput) -> None:
        """Compute the step's `encoder_inputs`. `output` must have been applied."""
        computed = self.compute(output.encoder_inputs)
        self._outputs.update(
            (item.content_hash, one) for item, one in zip(output.encoder_inputs, computed, strict=True)
        )
        self._lacking.difference_update(item.content_hash for item in output.encoder_inputs)
        self.num_computed += len(computed)

    def compute(self, media: Sequence[MediaItem]) -> list[torch.Tensor]:
        """Return the encoder's outputs for each item: [item.length, size]. Their bits do not depend on each other."""
        found: list[torch.Tensor] = []
        piece: list[EncoderItem] = []
        for one in media:
            assert one.features is not None, "requests are checked when they are added"
            item = self._encoder.item(one.features, one.grid)
            if piece and sum(other.num_tokens for other in piece) + item.num_tokens > ENCODER_PIECE_TOKENS:
                found += self._compute(piece)
                piece = []
            piece.append(item)
        return found + self._compute(piece) if piece else found

    def _compute(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        """Compute items at once."""
        outputs = self._forward.run(make_encoder_batch(items, self._dtype, self._forward.staging.device), ()).hidden
        each = outputs.split([item.num_outputs for item in items])
        return list(each) if len(each) == 1 else [one.clone() for one in each]  # which are dropped one by one

    def embeds(self, output: SchedulerOutput) -> StepEmbeds | None:
        """Return the outputs that take the place of tokens of the step, None for none.

        Drop the items of prompts that it computes past their last one.
        """
        if self._crosses or not self._items:
            return None
        ends = np.cumsum(output.num_new)
        values: list[torch.Tensor] = []
        index: list[np.ndarray] = []
        seen: list[np.ndarray] = []
        for i in np.flatnonzero(np.isin(output.rows, list(self._items))).tolist():
            row, start, num_new = int(output.rows[i]), int(output.start[i]), int(output.num_new[i])
            items, begin = self._items[row], int(ends[i]) - num_new
            for item in items:
                first, last = max(start, item.offset), min(start + num_new, item.end)
                places = np.arange(first, last)
                if (own := self._encoder.has_own_embedding(item.grid)) is not None:
                    places = places[~own[places - item.offset]]
                if len(places):
                    values.append(self._rows_of(item, places - item.offset))
                    index.append(places + (begin - start))
                    seen.append(np.full(len(places), item.end - 1, np.int32))
            if start + num_new >= _end(items):
                del self._items[row]
        if not values:
            return None
        whole = np.concatenate(seen) if self._encoder.whole_items else None
        return StepEmbeds(torch.cat(values), np.concatenate(index), whole)

    def states(self, output: SchedulerOutput) -> StepStates | None:
        """Return the outputs that cross attention writes to the cache in the step, None for none.

        Drop the items of their rows.
        """
        if not self._crosses or not output.encoder_runs:
            return None
        values: list[torch.Tensor] = []
        rows: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        for run in output.encoder_runs:
            if run.row not in self._items:  # its blocks are filled: the run was another's, which is not in this step
                continue
            items = self._items[run.row]
            first = sum(item.length for item in items[: run.item])
            values.append(self._kept(items[run.item]))
            rows.append(np.full(len(values[-1]), run.row))
            positions.append(np.arange(first, first + len(values[-1])))
        for run in output.encoder_runs:
            self._items.pop(run.row, None)
        return StepStates(torch.cat(values), np.concatenate(rows), np.concatenate(positions)) if values else None

    def _rows_of(self, item: MediaItem, rows: np.ndarray) -> torch.Tensor:
        """Return rows of the item's output, ascending; without a copy where they are adjacent."""
        kept = self._kept(item)
        if rows[-1] - rows[0] == len(rows) - 1:
            return kept[rows[0] : rows[-1] + 1]
        return kept[torch.from_numpy(rows).to(kept.device)]

    def _kept(self, item: MediaItem) -> torch.Tensor:
        """Return the item's output; zeros if its run failed in an earlier step: then its tokens are computed again."""
        kept = self._outputs.get(item.content_hash)
        if kept is None:
            if item.content_hash not in self._lacking:
                raise RuntimeError(f"the encoder output {item.content_hash!r} was not computed, or dropped too early")
            kept = torch.zeros(item.length, self._encoder.output_size, dtype=self._dtype)
        return kept.to(self._forward.staging.device)

    def run_largest(self, num_tokens: int) -> None:
        """Compute as many of the largest items as a step of so many encoder tokens can have; keep nothing."""
        largest = self._encoder.largest_item()
        self.compute([largest] * max(1, num_tokens // largest.length))


def make_encoder_batch(items: Sequence[EncoderItem], dtype: torch.dtype, device: torch.device) -> ForwardBatch:
    """Return a batch of items, one after the other. All arrays are moved to the device in one copy."""
    num_tokens = sum(item.num_tokens for item in items)
    num_outputs = sum(item.num_outputs for item in items)
    positions = [
        np.arange(item.num_tokens, dtype=np.int32) if item.positions is None else item.positions for item in items
    ]
    lengths = [np.concatenate([item.segments[kind] for item in items]) for kind in range(len(items[0].segments))]
    named = {name: _joined(items, name) for name in items[0].inputs}
    of_tokens, of_outputs, of_named, *of_kinds = parts_to_device(
        [
            [np.zeros(num_tokens, np.int32), np.concatenate(positions)],
            [np.arange(num_outputs, dtype=np.int64), np.zeros(0, np.int64)],
            [*named.values()],
            *map(_segments, lengths),
        ],
        device,
    )
    metadata: list[AttentionMetadata] = []
    for of_kind, (start, length, table, slots) in zip(lengths, of_kinds, strict=True):
        longest = int(of_kind.max())
        metadata.append(AttentionMetadata(start, length, table, slots, 1, longest, longest))
    inputs: dict[str, Input] = {}
    for name, tensor in zip(named, of_named, strict=True):
        values = tensor.to(dtype) if tensor.is_floating_point() else tensor
        inputs[name] = Input(values, items[0].inputs[name].domain)
    token_ids, at = of_tokens
    output_index, no_logits = of_outputs
    return ForwardBatch(token_ids, at, tuple(metadata), OutputRows(output_index, tuple(metadata)), no_logits, inputs)


def _segments(lengths: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return where segments begin, their lengths, and block tables and slots, which nothing reads."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return starts, lengths, np.zeros((len(lengths), 1), np.int32), np.zeros(1, np.int64)


def _joined(items: Sequence[EncoderItem], name: str) -> np.ndarray:
    """Return an input of all items; numbers of rows count those of the items before."""
    arrays = [item.inputs[name] for item in items]
    indexed = arrays[0].indexes
    if indexed is None:
        return np.ascontiguousarray(np.concatenate([array.values for array in arrays]))
    before = accumulate((item.num_rows(indexed) for item in items[:-1]), initial=0)
    moved = (np.where(one.values < 0, -1, one.values + first) for one, first in zip(arrays, before, strict=True))
    return np.ascontiguousarray(np.concatenate(list(moved)))


def _end(media: Sequence[MediaItem]) -> int:
    """Return the position after the last item."""
    return max(item.end for item in media)
