"""`pagoda replay`: run a recorded engine's scheduling again, and say where it decides otherwise."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pagoda.base.errors import ConfigError
from pagoda.cli.help_format import JsonObject


def replay(
    recording: Annotated[Path, typer.Argument(help="A file that an engine wrote with --record.")],
    changed: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change an option. May be repeated.")
    ] = None,
    as_json: JsonObject = False,
) -> None:
    """Run a recording's scheduling again, without a model.

    Exit with code 1 if something is decided otherwise than recorded.
    """
    import json
    from dataclasses import fields

    from pagoda.core.scheduler_options import SchedulerOptions
    from pagoda.engine.recording.replay import replay as run

    options = dict(_pair(text) for text in changed or ())
    known = [field.name for field in fields(SchedulerOptions)]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(f"--set {unknown[0]}: no such option; there are {', '.join(known)}")
    found = run(recording, options)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        print(f"{found.num_requests} requests, {found.num_steps} steps replayed")
        if found.cut:
            print(f"the recording is not whole: {found.cut}")
        if found.difference is None:
            print("every decision is as recorded")
        else:
            print(f"first difference in line {found.difference.line}, step {found.difference.step}:")
            print(f"  recorded  {found.difference.recorded}\n  replayed  {found.difference.replayed}")
    if found.difference is not None:
        raise typer.Exit(1)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: expected NAME=VALUE, as in --set max_num_seqs=8")
    return name.replace("-", "_"), value
