"""All cases of a seed: `make_case(seed, number)` is the same bytes on every machine, so a case can be sent alone."""

import random
from collections.abc import Callable

from tests.hostile import bodies, tensor_bodies, wire_cases
from tests.hostile.case import Case, Expect, Leave, request
from tests.hostile.routes import ADMIN_PATHS

_BODIES: tuple[tuple[Callable[[random.Random], bodies.Body], int], ...] = (
    (bodies.several_fields, 20),
    (bodies.tree, 14),
    (bodies.flood, 10),
    (bodies.long_string, 12),
    (bodies.nesting, 8),
    (bodies.not_json, 12),
    (bodies.template, 2),
    (bodies.products, 3),
    (bodies.unknown_ids, 4),
    (tensor_bodies.embeddings, 6),
)
_WIRE: tuple[tuple[Callable[[random.Random, str], Case], int], ...] = (
    (wire_cases.headers, 10),
    (wire_cases.targets, 10),
    (wire_cases.chunks, 6),
    (wire_cases.trailers, 4),
    (wire_cases.leavers, 8),
    (wire_cases.slow, 2),
    (wire_cases.pipelines, 6),
    (wire_cases.long_pipelines, 1),
    (wire_cases.same_ids, 5),
)


NUM_SINGLE_FIELDS = len(bodies.SINGLE_FIELDS)


def make_case(name: str) -> Case:
    """The case of this name, the same bytes on every machine: "seed:number" is drawn, "field:number" enumerated."""
    seed, _, number = name.partition(":")
    draw = random.Random(name)
    if seed == "field":
        return _with_body(draw, name, "field", bodies.single_field(int(number)))
    makers = [*_BODIES, *_WIRE]
    maker = draw.choices(range(len(makers)), [weight for _, weight in makers])[0]
    if maker < len(_BODIES):
        make_body = _BODIES[maker][0]
        return _with_body(draw, name, make_body.__name__.replace("_", " "), make_body(draw))
    return _WIRE[maker - len(_BODIES)][0](draw, name)


def case_names(seed: int, num_fields: int, num_drawn: int) -> list[str]:
    """`num_fields` of the enumerated cases, spread over routes, places and values, mixed with drawn ones."""
    # A stride without a common factor visits all of them.
    fields = [f"field:{(seed * num_fields + i) * 7919 % NUM_SINGLE_FIELDS}" for i in range(num_fields)]
    names = [*fields, *(f"{seed}:{i}" for i in range(num_drawn))]
    random.Random(seed).shuffle(names)
    return names


def _with_body(draw: random.Random, name: str, kind: str, body: bodies.Body) -> Case:
    path, data, title = body
    sent = request(path, data, key="admin" if path in ADMIN_PATHS else "attacker")
    if draw.random() < 0.05:  # the body arrives late, or its client is gone by then
        at = sent.index(b"\r\n\r\n") + 4
        cut = draw.randrange(at, len(sent) + 1)
        return Case(name, kind, f"{path} {title}, in two pieces", (sent[:cut], sent[cut:]), 0.02)
    if draw.random() < 0.03:
        return Case(name, kind, f"{path} {title}, leaves", (sent,), leave=Leave.AT_ONCE, expect=Expect.NOTHING)
    return Case(name, kind, f"{path} {title}", (sent,))
