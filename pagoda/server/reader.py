"""Reader: what one output says, as the events of a turn."""

import uuid
from collections.abc import Callable, Sequence

from pagoda.base.outputs import CompletionOutput
from pagoda.engine.answers.reasoning import ReasoningSplitter
from pagoda.engine.answers.tool_parsers.base import ToolCall, ToolParser
from pagoda.server.turn import CallDelta, ReasoningDelta, TextDelta, TurnEnd, TurnEvent


class Reader:
    """Reads one output: plain text, unless it is given tools and a reasoning format to look for."""

    def __init__(
        self,
        tools: ToolParser | None = None,
        reasoning: ReasoningSplitter | None = None,
        token_bytes: Callable[[int], bytes] = bytes,
        is_forced: bool = False,
        is_parallel: bool = True,
    ) -> None:
        """token_bytes: returns those of a token.   is_forced: the output is one or more calls.

        is_parallel: calls after the first are kept.
        """
        self._tools = tools
        self._reasoning = reasoning
        self._token_bytes = token_bytes
        self._is_forced = is_forced
        self._is_parallel = is_parallel
        self._last_bytes = b""
        self._num_until_end = 0
        self._has_thought = False
        self._num_calls = 0
        self.reasons = reasoning is not None
        self.num_reasoning_tokens = 0  # up to the end of the reasoning
        self._is_call_kept = True
        self._told: type[TurnEvent] | None = None

    def read(self, output: CompletionOutput) -> list[TurnEvent]:
        """Add what an output has said; return the events that are certain now."""
        text, reason = output.text, output.finish_reason
        is_last = reason is not None
        events: list[TurnEvent] = []
        if self._reasoning is not None:
            self._count_reasoning(self._reasoning, output.token_ids)
            thought, text = self._reasoning.feed(text)
            if is_last:
                more_thought, more_text = self._reasoning.end()
                thought, text = thought + more_thought, text + more_text
            if thought:
                self._has_thought = True
                events.append(ReasoningDelta(thought))
            if self._has_thought:
                self.num_reasoning_tokens = self._num_until_end
        if self._tools is not None:
            for piece in (*self._tools.feed(text).pieces, *(self._tools.end().pieces if is_last else ())):
                if isinstance(piece, ToolCall):
                    self._add_call(events, piece)
                elif not self._is_forced:  # else it is a call that was cut off before its name was complete
                    events.append(TextDelta(piece))
        elif text:
            events.append(TextDelta(text))
        if reason is not None:
            is_call = self._num_calls and reason == "stop"
            events.append(TurnEnd("tool_calls" if is_call else reason, output.stop_reason))
        return events

    def ends_part(self, events: Sequence[TurnEvent]) -> bool:
        """Return whether these events finish the current part of the answer: a thought, a text or a call."""
        has_ended = False
        for event in events:
            if type(event) is not self._told or (isinstance(event, CallDelta) and event.name is not None):
                self._told, has_ended = type(event), True
        return has_ended

    def _add_call(self, events: list[TurnEvent], call: ToolCall) -> None:
        if call.name is not None:
            self._is_call_kept = self._is_parallel or not self._num_calls
            self._num_calls += self._is_call_kept
        if self._is_call_kept:
            call_id = None if call.name is None else call.id or f"call_{uuid.uuid4().hex[:24]}"
            events.append(CallDelta(self._num_calls - 1, call.arguments, call_id, call.name))

    def _count_reasoning(self, reasoning: ReasoningSplitter, token_ids: Sequence[int]) -> None:
        end = reasoning.tags.end.encode()
        for token_id in token_ids:
            if end in self._last_bytes:
                return
            self._last_bytes = self._last_bytes[-len(end) :] + self._token_bytes(token_id)
            self._num_until_end += 1
