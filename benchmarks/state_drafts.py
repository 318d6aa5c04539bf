"""What drafts save and what they compute, counted: attention alone beside models with recurrent states.

Run: python benchmarks/state_drafts.py. Only the scheduler and the n-gram drafter run; the text is known.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.state_hits import ATTENTION, LFM2
from pagoda.base.clock import VirtualClock
from pagoda.base.config import CacheConfig
from pagoda.base.sampling_params import SamplingParams
from pagoda.core.kv import KVGroupSpec
from pagoda.core.request import Request
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.core.scheduler_output import ModelRunnerOutput
from pagoda.worker.speculation.lookup import NgramDrafter
from pagoda.worker.table_mirror import TableMirror

LONGEST = 16_384
MODELS: dict[str, tuple[KVGroupSpec, ...]] = {"attention alone": (ATTENTION,), "with states": (ATTENTION, LFM2)}
Drafting = Callable[[np.ndarray, int], np.ndarray]
"""(text, tokens of it that are known) -> drafts, int32."""


@dataclass
class Counts:
    """Of the steps after the prompt's."""

    steps: int = 0
    emitted: int = 0
    computed: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def again(self) -> int:
        """Tokens that were computed, neither for the first time nor as drafts that were wrong."""
        return self.computed - self.emitted - (self.drafted - self.accepted)


def count(groups: tuple[KVGroupSpec, ...], text: np.ndarray, num_prompt: int, draft: Drafting) -> Counts:
    """Generate `text` after its first `num_prompt` tokens."""
    options = SchedulerOptions(max_num_seqs=1, max_num_batched_tokens=LONGEST)
    scheduler = Scheduler(options, CacheConfig(), groups, 2048, LONGEST, VirtualClock())
    params = SamplingParams(max_tokens=len(text) - num_prompt, ignore_eos=True)
    scheduler.add_request(Request("", text[:num_prompt], params))
    counts, known = Counts(), num_prompt
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        offered = output.drafts.get(int(output.rows[0]), text[:0])
        truth = text[known : known + len(offered)]
        num_right = int(np.argmin([*(offered == truth), False]))
        sampled = text[None, known : known + num_right + 1]
        if known > num_prompt:
            counts.steps, counts.emitted = counts.steps + 1, counts.emitted + sampled.size
            counts.computed += int(output.num_new.sum())
            counts.drafted, counts.accepted = counts.drafted + len(offered), counts.accepted + num_right
        known += sampled.size
        most = len(text) - known - 1
        drafts = {int(output.rows[0]): draft(text, known)[:most]} if most > 0 else {}
        num_sampled = np.array([sampled.size], np.int32)
        scheduler.update_from_output(output, ModelRunnerOutput(output.step, sampled, num_sampled, drafts=drafts))
    return counts


def guesses(share: float, most: int) -> Drafting:
    """Each token is right with the probability `share`."""
    rng = np.random.default_rng(7)
    return lambda text, known: np.where(rng.random(most) < share, _next(text, known, most), -1).astype(np.int32)


def _next(text: np.ndarray, known: int, count: int) -> np.ndarray:
    return np.resize(text[known : known + count], count)


def lookup(most: int) -> Drafting:
    """Those of the method `ngram`."""
    drafter, table = NgramDrafter(2, 16), TableMirror(1, LONGEST, 16, 1)

    def draft(text: np.ndarray, known: int) -> np.ndarray:
        table.token_ids[0, :known], table.num_tokens[0] = text[:known], known
        return drafter.propose(table, np.zeros(1, np.int32), np.array([most], np.int32))[0].tokens

    return draft


def texts() -> dict[str, tuple[np.ndarray, int]]:
    """Return texts, words and signs as tokens, with how many are the prompt."""
    root = Path(__file__).parents[1]
    code, page = ((root / name).read_text() for name in ("benchmarks/state_hits.py", "docs/start/architecture.md"))
    edit = code + code.replace("prompt", "request").replace("rng", "draws")
    ids: dict[str, int] = {}

    def tokens(text: str) -> np.ndarray:
        return np.array([ids.setdefault(word, len(ids)) for word in re.findall(r"\s?\w+|\s?\W", text)], np.int32)

    half = len(tokens(page)) // 2
    return {
        "code, then the same edited": (tokens(edit), len(tokens(code))),
        "a page's second half": (tokens(page), half),
    }


def main() -> None:
    print(f"{'drafts':>7}{'right':>7}   tokens per step: emitted, computed by {' and '.join(MODELS)}")
    text = np.arange(4000, dtype=np.int32)
    for most in (4, 8):
        for share in (0.3, 0.8, 0.95):
            each = [count(groups, text, 16, guesses(share, most)) for groups in MODELS.values()]
            per_step = "".join(f"{one.computed / one.steps:8.1f}" for one in each)
            print(f"{most:7}{share:7.0%}{each[0].emitted / each[0].steps:11.2f}{per_step}")
    for name, (text, num_prompt) in texts().items():
        print(f"\n{name}: {num_prompt} tokens of prompt, {len(text) - num_prompt} generated, ngram, 8 drafts")
        for model, groups in MODELS.items():
            found = count(groups, text, num_prompt, lookup(8))
            print(f"    {model}: {found}, again: {found.again}")


if __name__ == "__main__":
    main()
