"""Drive a scheduler through a scenario and write down, step by step, what it decides.

A scheduler takes part through an object with the methods of `Subject`. The records are plain dicts: they are lines
of JSON in the end.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

Record = dict[str, Any]
Scenario = dict[str, Any]


class Subject(Protocol):
    """A scheduler as the replay sees it."""

    def add(self, request: Record) -> None:
        """A request of the scenario, its prompt spelled out as a list of token ids."""
        ...

    def schedule(self) -> Record:
        """Plan a step.

        scheduled: [[id, tokens], ...] in order.   admitted: [{id, kind: new | resumed, cached}, ...].
        preempted: sorted ids thrown out since the last step.   samples: ids that get a token.
        drafts: id -> draft tokens in the step.
        encoder: id -> places of the items encoded.   handle: given back to `update`.
        """
        ...

    def update(self, handle: Any, sampled: dict[str, list[int]]) -> Record:
        """emitted: id -> tokens.   finished: id -> reason."""
        ...

    def set_drafts(self, drafts: dict[str, list[int]]) -> None: ...

    def abort(self, ids: list[str]) -> None: ...

    def reset_prefix_cache(self, preempt_running: bool) -> bool: ...

    def state(self) -> Record:
        """free_blocks; running, waiting: ids in order; blocks: running id -> number (or one a KV group);
        computed: live id -> tokens."""
        ...


def expand_prompt(prompt: Any) -> list[int]:
    """A prompt as the format writes it: a list, {range: [a, b]}, {repeat: [token, times]}, {concat: [prompts]}."""
    if isinstance(prompt, list):
        return list(prompt)
    if "range" in prompt:
        return list(range(*prompt["range"]))
    if "repeat" in prompt:
        token, times = prompt["repeat"]
        return [token] * times
    if "concat" in prompt:
        return [token for part in prompt["concat"] for token in expand_prompt(part)]
    raise ValueError(f"a prompt is a list, range, repeat or concat, not {prompt!r}")


class ScriptedModel:
    """Says what the scenario scripted: output i of a request is outputs[i], else the fill token."""

    def __init__(self, scenario: Scenario) -> None:
        self.fill: int = scenario.get("fill_token", 7)
        self.script: dict[str, list[int]] = {r["id"]: r.get("outputs", []) for r in scenario["requests"]}
        self.drafts = {r["id"]: deque(r.get("drafts", [])) for r in scenario["requests"]}
        self.said = dict.fromkeys(self.script, 0)

    def sample(self, request_id: str, drafts: list[int]) -> list[int]:
        """The accepted drafts and the token after them."""
        position = self.said[request_id]
        tokens = [self._token(request_id, position)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            position += 1
            tokens.append(self._token(request_id, position))
        return tokens

    def _token(self, request_id: str, position: int) -> int:
        script = self.script[request_id]
        return script[position] if position < len(script) else self.fill

    def heard(self, result: Record) -> dict[str, list[int]]:
        """Take note of what was emitted; the drafts to offer now."""
        offers: dict[str, list[int]] = {}
        for request_id, tokens in result["emitted"].items():
            self.said[request_id] += len(tokens)
            if tokens and request_id not in result["finished"] and self.drafts[request_id]:
                offers[request_id] = list(self.drafts[request_id].popleft())
        return offers


def replay(scenario: Scenario, subject: Subject) -> Iterator[Record]:
    """Return one record per step, until everything has ended."""
    model = ScriptedModel(scenario)
    depth: int = scenario["config"].get("pipeline_depth", 1)
    in_flight: deque[tuple[int, Record]] = deque()
    live: set[str] = set()
    last_event = max(
        [1]
        + [request.get("arrival_step", 1) for request in scenario["requests"]]
        + [action["step"] for action in scenario.get("actions", [])]
    )
    for step in range(1, scenario.get("max_steps", 40) + 1):
        line: Record = {"scenario": scenario["name"], "step": step}
        events = _events(scenario, step, subject, live)
        if events:
            line["events"] = events
        plan = subject.schedule()
        state = subject.state()
        line |= {key: plan[key] for key in ("scheduled", "admitted", "preempted")}
        if plan.get("drafts"):
            line["drafts"] = {request_id: len(tokens) for request_id, tokens in plan["drafts"].items()}
        if plan.get("encoder"):
            line["encoder"] = plan["encoder"]
        line["free_after_schedule"] = state["free_blocks"]
        line |= {key: state[key] for key in ("running", "waiting", "blocks")}
        if plan["scheduled"]:
            in_flight.append((step, plan))
        if in_flight and (len(in_flight) >= depth or not plan["scheduled"]):
            planned_at, plan = in_flight.popleft()
            sampled = {
                request_id: model.sample(request_id, plan.get("drafts", {}).get(request_id, []))
                if request_id in plan["samples"]
                else []
                for request_id, _ in plan["scheduled"]
            }
            result = subject.update(plan["handle"], sampled)
            offers = model.heard(result)
            if offers:
                subject.set_drafts(offers)
            if depth > 1:
                line["updated_step"] = planned_at
            live -= set(result["finished"])
            state = subject.state()
            line |= {
                "emitted": result["emitted"],
                "finished": result["finished"],
                "free_after_update": state["free_blocks"],
                "n_running": len(state["running"]),
                "n_waiting": len(state["waiting"]),
                "computed": state["computed"],
            }
        yield line
        if not live and not in_flight and step >= last_event:
            return


def _events(scenario: Scenario, step: int, subject: Subject, live: set[str]) -> list[Record]:
    events: list[Record] = []
    for action in scenario.get("actions", []):
        if action["step"] != step:
            continue
        if "abort" in action:
            subject.abort(action["abort"])
            live -= set(action["abort"])
            events.append({"abort": action["abort"]})
        if "reset_prefix_cache" in action:
            done = subject.reset_prefix_cache(action["reset_prefix_cache"]["preempt_running"])
            events.append({"reset_prefix_cache": done})
    for request in scenario["requests"]:
        if request.get("arrival_step", 1) == step:
            subject.add(request | {"prompt": expand_prompt(request["prompt"])})
            live.add(request["id"])
            events.append({"add": request["id"]})
    return events
