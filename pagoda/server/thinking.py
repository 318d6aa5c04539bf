"""What requests say about reasoning: variables of the chat template where it reads them, else a budget of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagoda.engine.answers.reasoning import reasoning_of
from pagoda.engine.templates.chat_template import variables_of

EFFORT_BUDGETS: Mapping[str, int] = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24_576}
"""Most tokens of reasoning with an effort that the template does not read; with others there is no limit."""
_SWITCHES: tuple[str, ...] = ("enable_thinking", "thinking")  # variables of templates
_EFFORT = "reasoning_effort"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much a model thinks before it answers; without effect where it does not think.

    is_on: False: as little as it can; None: as its template has it.   effort: in a word; "none" is off.
    budget: most tokens, None for what the effort stands for.
    """

    is_on: bool | None = None
    effort: str | None = None
    budget: int | None = None

    @property
    def _is_wanted(self) -> bool | None:
        return self.effort != "none" if self.is_on is None and self.effort is not None else self.is_on

    @property
    def variables(self) -> dict[str, Any]:
        """Those of the template, which need not read them."""
        given: dict[str, Any] = {} if self._is_wanted is None else dict.fromkeys(_SWITCHES, self._is_wanted)
        return given if self.effort is None else {**given, _EFFORT: self.effort}

    def limit(self, template: str | None) -> int | None:
        """Return the most tokens of reasoning in answers to prompts of this template; None: no limit."""
        if template is None or reasoning_of(template) is None:
            return None
        if self._is_wanted is False:
            return 0 if variables_of(template).isdisjoint(_SWITCHES) else None
        if self.budget is not None or self.effort is None or _EFFORT in variables_of(template):
            return self.budget
        return EFFORT_BUDGETS.get(self.effort)
