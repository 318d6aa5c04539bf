"""SwappedPass: bring parked requests back from host memory. It mirrors admission."""

from pagoda.core.decision_log import Reason
from pagoda.core.entry_checks import EntryChecks, Verdict
from pagoda.core.request import LoraRef, RequestStatus
from pagoda.core.request_table import Branch
from pagoda.core.scheduler_output import AdmitKind
from pagoda.core.scheduler_state import SchedulerState
from pagoda.core.step_plan import Entry, StepPlan


class SwappedPass:
    """Asks the swapped line in order; a request comes back with all its branches or not at all."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._checks = EntryChecks(state)

    def run(self, plan: StepPlan) -> bool:
        """Bring parked requests back while there are seats, blocks and budget.

        False when one of them has to wait: then nobody may overtake it from the waiting line.
        """
        state = self._state
        closed: set[LoraRef] = set()
        while plan.budget > 0 and (live := state.swapped.head(closed)) is not None:
            branches = live.unfinished
            if state.lora_gate.refusal(live) and live.request.lora:
                self._checks.hold(live, Reason.LORA, stops_line=False)
                closed.add(live.request.lora)
                continue
            if live.has_tokens_in_flight:
                self._checks.hold(live, Reason.IN_FLIGHT)
                return False
            if not self._checks.has_seats(live):
                self._checks.hold(live, Reason.SEATS)
                return False
            wants = self._divide(plan, [len(branch.token_ids) - branch.num_computed for branch in branches])
            ends = [branch.num_computed + want for branch, want in zip(branches, wants, strict=True)]
            verdict, reason = self._return_verdict(branches, ends)
            if verdict is Verdict.NEVER:
                self._checks.refuse(live, "can never come back from host memory")
                continue
            if verdict is Verdict.LATER:
                self._checks.hold(live, reason)
                return False
            state.swapped.remove(live)
            state.enter_running(live)
            for branch in branches:
                state.give_row(branch, branch.num_computed)
            state.swap.swap_in(branches)
            for branch, want, end in zip(branches, wants, ends, strict=True):
                start = branch.num_computed
                branch.status = RequestStatus.RUNNING
                plan.entries[branch.row] = Entry(branch.row, AdmitKind.SWAPPED_IN, start)
                if want:
                    state.kv.grow_swapped_in(branch.row, end)
                    plan.place(branch.row, start, want)
            plan.num_swapped += 1
            self._checks.note_admitted(live, sum(wants), 0)
        return plan.budget > 0

    def _divide(self, plan: StepPlan, wants: list[int]) -> list[int]:
        left, shares = plan.budget, []
        for want in wants:
            share = min(want, left, plan.prompt_cap or want)
            shares.append(share)
            left -= share
        return shares

    def _return_verdict(self, branches: list[Branch], ends: list[int]) -> tuple[Verdict, Reason]:
        state = self._state
        need = state.swap.blocks_to_return(branches, ends)
        return self._checks.against_free(need)
