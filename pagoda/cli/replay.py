"""`pagoda replay`: run a recorded engine's scheduling again, and say where it does otherwise."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagoda.base.errors import ConfigError
from pagoda.cli.help_format import JsonObject

if TYPE_CHECKING:
    from pagoda.engine.recording.replay import Replay


def replay(
    recording: Annotated[Path, typer.Argument(help="A file that an engine wrote with --record.")],
    changed: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change an option. May be repeated.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="NAME=VALUE",
            help="Compare only: request=r3, client=0, adapter=NAME, step=10-20, time=1.5-3. May be repeated.",
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(min=0, help="Times as fast as recorded (0: as fast as possible).", show_default=False)
    ] = 0.0,
    compute: Annotated[
        bool, typer.Option("--compute", help="Let the model compute the steps, too; compare its tokens and times.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model for --compute, where the recorded one is elsewhere on this machine.")
    ] = None,
    factor: Annotated[
        float, typer.Option(min=1, help="With --compute: name the first step whose time differs by more (default: 2).")
    ] = 2.0,
    as_json: JsonObject = False,
) -> None:
    """Run a recording's scheduling again, without a model unless --compute is given.

    Exit with code 1 if something is decided, or a token sampled, otherwise than recorded.
    """
    import json
    from dataclasses import fields

    from pagoda.core.scheduler_options import SchedulerOptions
    from pagoda.engine.recording.replay import replay as run
    from pagoda.engine.recording.selection import Selection

    options = dict(_pair(text) for text in changed or ())
    known = [field.name for field in fields(SchedulerOptions)]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(f"--set {unknown[0]}: no such option; there are {', '.join(known)}")
    start_model = None
    if compute:
        from pagoda.assembly.recorded_model import start_recorded_model

        start_model = partial(start_recorded_model, model=model)
    selection = Selection.of(only or ())
    found = run(recording, options, selection, speed=speed, start_model=start_model, factor=factor)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        for line in _lines(found, computed=compute):
            print(line)
    if found.difference is not None or found.token is not None:
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: expected NAME=VALUE, as in --set max_num_seqs=8")
    return name.replace("-", "_"), value


def _lines(found: "Replay", *, computed: bool) -> list[str]:
    """Return what is printed of a replay."""
    lines = [f"{found.num_requests} requests, {found.num_steps} steps replayed"]
    if found.cut:
        lines.append(f"the recording is not whole: {found.cut}")
    if found.difference is None:
        lines.append("every decision is as recorded")
    else:
        lines.append(f"first difference in line {found.difference.line}, step {found.difference.step}:")
        lines.append(f"  recorded  {found.difference.recorded}\n  replayed  {found.difference.replayed}")
    if not computed:
        return lines
    token = found.token
    if token is not None:
        lines.append(
            f"first token that differs: request {token.request}, sequence {token.sequence}, position {token.position}, "
            f"in step {token.step}: expected {_shown(token.expected)}, got {_shown(token.got)}"
        )
    elif found.num_tokens:
        lines.append(f"{found.num_tokens} tokens are as recorded")
    else:
        lines.append("no tokens were compared: the recording has none (--record-tokens)")
    for times in found.times:
        lines.append(
            f"{times.kind} steps: {times.num_steps}, median {1e3 * times.recorded_s:.2f} ms recorded, "
            f"{1e3 * times.replayed_s:.2f} ms replayed"
        )
    if (slow := found.slow) is not None:
        lines.append(
            f"first step whose time differs by more than the factor: step {slow.step} ({slow.kind}), "
            f"{1e3 * slow.recorded_s:.2f} ms recorded, {1e3 * slow.replayed_s:.2f} ms replayed"
        )
    return lines


def _shown(token: int | None) -> str:
    return "none" if token is None else str(token)
