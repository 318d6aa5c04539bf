"""What a failed step spoils: the rows and blocks whose KV depends on what its rows should have computed.

When a step fails, later steps may have been planned on top of it already: its rows continue, new rows have found its
blocks in the prefix cache, sequences have forked from its rows. Steps complete in order, so none of their results has
been used yet.
"""

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from pagoda.core.kv import KVCacheManager
from pagoda.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


def failed_result(output: SchedulerOutput, message: str) -> ModelRunnerOutput:
    """Return the result of a step that raised: every row that it computes or samples has failed."""
    num_samples = len(output.sample_rows)
    return ModelRunnerOutput(
        output.step,
        sampled=np.full((num_samples, 1), -1, np.int32),
        num_sampled=np.zeros(num_samples, np.int32),
        failed=dict.fromkeys((*output.rows.tolist(), *output.sample_rows.tolist()), message),  # forks sample, too
    )


def find_spoiled(
    failed: Collection[int],
    readers: Mapping[int, set[int]],
    output: SchedulerOutput,
    later: Iterable[SchedulerOutput],
    kv: KVCacheManager,
) -> tuple[set[int], set[int]]:
    """Return the rows and the blocks with KV that depends on what the `failed` rows of a step should have computed.

    readers: by step, rows whose chunks cannot be right for another reason (they read an encoder output of this step).
    output: the failed step.   later: the steps planned after it, oldest first; none of them is complete.
    Rows that their sequences have left are among them: such a row is not given out again while a step names it.
    """
    steps = [output, *later]
    rows, blocks = set(failed), set[int]()
    for number, step in enumerate(steps):
        after = steps[number + 1 :]
        if number:
            blocks -= _fresh_blocks(step, kv)
            blocks.update(target for source, target in step.copies.tolist() if source in blocks)
            rows -= {init.row for init in step.admitted} | {fork.dst for fork in step.forks}
        ends = step.start + step.num_new
        placed = zip(step.rows.tolist(), step.start.tolist(), ends.tolist(), strict=True)
        written = {row: (start, end) for row, start, end in placed}
        rows |= readers.get(step.step, set())
        for row in rows & written.keys():
            blocks |= _written_blocks(row, *written[row], after, kv)
        for init in step.admitted:  # in the order of admission: one may have found blocks of those before it
            num_found = init.num_computed // kv.block_size
            found = {block for group in kv.growing for block in init.block_ids[group][:num_found].tolist()}
            if init.row not in rows and not blocks.isdisjoint(found):
                rows.add(init.row)
                if init.row in written:
                    blocks |= _written_blocks(init.row, *written[init.row], after, kv)
        rows.update(fork.dst for fork in step.forks if fork.src in rows)
    return rows, blocks - {0}


def _fresh_blocks(step: SchedulerOutput, kv: KVCacheManager) -> set[int]:
    """Return the blocks that rows get in this step, to be written from then on."""
    fresh = {*step.block_delta.block_ids.tolist(), *step.swap_in[:, 1].tolist()}
    for init in step.admitted:
        num_found = init.num_computed // kv.block_size
        for group in kv.growing:
            fresh.update(init.block_ids[group][num_found:].tolist())
    return fresh


def _written_blocks(row: int, start: int, end: int, after: list[SchedulerOutput], kv: KVCacheManager) -> set[int]:
    """Return the blocks to which a step wrote the row's positions `start` .. `end` - 1."""
    blocks = kv.blocks_between(row, start, end)
    for step in reversed(after):  # it had other blocks before it copied them
        delta = step.block_delta
        mine = set(delta.block_ids[delta.rows == row].tolist())
        blocks.update(source for source, target in step.copies.tolist() if target in blocks and target in mine)
    return blocks
