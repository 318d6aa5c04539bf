"""Drafting: the speculator of a worker, if it has one, which an error turns off."""

import logging
from collections.abc import Mapping

import numpy as np

from pagoda.core.scheduler_output import SchedulerOutput
from pagoda.worker.grammar_rows import GrammarRows
from pagoda.worker.speculation.speculator import NEVER_DRAFTS, Speculator
from pagoda.worker.table_mirror import TableMirror

logger = logging.getLogger("pagoda")


class Drafting:
    """What a step asks of the speculator, which may be absent.

    speculator: None if nothing drafts, or nothing does any more.
    """

    def __init__(self, speculator: Speculator | None, grammars: GrammarRows | None) -> None:
        """grammars: None if no request may have a grammar; otherwise, they shorten drafts that they forbid."""
        self.speculator = speculator
        self._grammars = grammars

    @property
    def is_on(self) -> bool:
        """Return whether there may be drafts."""
        return self.speculator is not None

    def begin_step(self) -> None:
        """See Speculator."""
        if self.speculator is not None:
            self.speculator.begin_step()

    def apply(self, output: SchedulerOutput, table: TableMirror) -> None:
        """See Speculator."""
        if self.speculator is not None:
            self.speculator.apply(output, table)

    def finish_step(
        self, output: SchedulerOutput, table: TableMirror, num_sampled: np.ndarray, failed: Mapping[int, str]
    ) -> dict[int, np.ndarray]:
        """Return drafts for the next step: see Speculator. `output` must not be empty.

        The step's tokens are committed, so that an error costs no more than drafts.
        """
        if self.speculator is None:
            return {}
        try:
            drafts = self.speculator.finish_step(output, table, num_sampled, failed)
            if self._grammars is not None and drafts:
                drafts = self._grammars.allowed_drafts(table, drafts)
        except Exception:
            logger.exception("drafting failed; this worker continues without speculation")
            self.speculator = None
            return {}
        return drafts

    @property
    def no_drafts_until(self) -> int:
        """Return the last step that is certain to propose no drafts."""
        return self.speculator.no_drafts_until if self.speculator is not None else NEVER_DRAFTS
