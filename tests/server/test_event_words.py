"""Events as people read them: who sees which other request is up to the reader."""

import pytest

from pagoda.core.events import (
    Admitted,
    ClientEvent,
    Failed,
    FirstToken,
    Held,
    Limited,
    Pinned,
    Preempted,
    Queued,
    Routed,
    Swapped,
)
from pagoda.core.request import AdmitKind, Reason
from pagoda.server.event_words import in_words, needs_blocks

AT = (7, 1.5, 0, 3)


def name_of(client: int, handle: int) -> str | None:
    return {(0, 3): "me", (0, 4): "mine"}.get((client, handle))


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Queued(*AT, "r", 9, 1, 0), "queued"),
        (Queued(*AT, "r", 9, 1, 3), "queued, 3 before it"),
        (Routed(*AT, 2, "shortest_wait"), "sent to replica 2: shortest wait"),
        (Held(*AT, Reason.BLOCKS, 0, 15, 3), "waits for 12 blocks: it takes 15, 3 are free"),
        (Held(*AT, Reason.BLOCKS, 0, 3, 3), "waits: not enough free blocks"),
        (Held(*AT, Reason.TURN, 0, 3, 9), "waits for its turn in the queue"),
        (Held(*AT, Reason.TURN, 2, 3, 9), "waits for its turn in the queue, 2 before it"),
        (Held(*AT, Reason.GRAMMAR, 0, 3, 9), "waits: grammar not compiled yet"),
        (
            Admitted(*AT, AdmitKind.NEW, 40, 16, 16, 24, 3, 9),
            "runs: 40 tokens, 16 found in the prefix cache, 24 of them in this step; it has 3 blocks",
        ),
        (
            Admitted(*AT, AdmitKind.RESUMED, 40, None, 0, 40, 3, 9),
            "runs again: 40 tokens, 40 of them in this step; it has 3 blocks",
        ),
        (Limited(*AT, 0, Reason.BUDGET), "computes less than it could: token budget spent"),
        (
            Preempted(*AT, 0, 4, "recompute", 33, 3),
            "preempted for mine: 33 tokens must be computed again, 3 blocks became free",
        ),
        (
            Preempted(*AT, 0, 5, "recompute", 33, 3),
            "preempted for another request: 33 tokens must be computed again, 3 blocks became free",
        ),
        (
            Preempted(*AT, 1, 4, "swap", 0, 3),
            "preempted for another request: its KV moved to host memory, 3 blocks became free",
        ),
        (
            Preempted(*AT, 0, 3, "recompute", 1, 3),
            "preempted for itself: 1 token must be computed again, 3 blocks became free",
        ),
        (
            Preempted(*AT, None, None, "recompute", 1, 3),
            "preempted: 1 token must be computed again, 3 blocks became free",
        ),
        (FirstToken(*AT, 9), "first token"),
        (Pinned(*AT, 0, 1, 300), "keeps 1 block in the prefix cache for 300 seconds"),
        (Failed(*AT, None), "a step failed; it is computed again"),
        (Swapped(*AT, True, 3), None),
    ],
)
def test_words(event: ClientEvent, words: str | None) -> None:
    assert in_words(event, name_of) == words


def test_only_a_wait_for_blocks_names_who_has_them() -> None:
    assert needs_blocks(Held(*AT, Reason.WATERMARK, 0, 3, 9))
    assert not needs_blocks(Held(*AT, Reason.NUM_SEQS, 0, 3, 9))
    assert not needs_blocks(FirstToken(*AT, 9))
