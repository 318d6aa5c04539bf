"""Planned commands: listed in the help; calling one prints that it is planned."""

from typing import Annotated

import typer

from pagoda.base.errors import NotSupportedError

PLANNED = {
    "transcribe": ("speech to text", "speech models (Whisper) are missing"),
    "run-batch": (
        "OpenAI's batch files",
        "the batch file format is missing; see `pagoda serve`",
    ),
    "top": ("a live view of a running server", "the terminal view is missing; `/metrics` and `/load` have the figures"),
    "simulate": ("a workload on a simulated machine", "the simulator is missing; see `pagoda bench scheduler`"),
    "replay": ("recorded traffic", "recording traffic is missing; see `pagoda bench serve`"),
}
"""Command -> what it will do, and what it waits for."""


def register(app: typer.Typer) -> None:
    """Add the planned commands to `app`. They are visible; their help says that they are planned."""
    for name, (summary, missing) in PLANNED.items():
        app.command(
            name,
            help=f"Planned, not available yet: {summary}.",
            rich_help_panel="Planned",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_refusing(name, missing))


def _refusing(name: str, missing: str):
    def run(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        raise NotSupportedError(f"`pagoda {name}` is planned and not available yet: {missing}")

    return run
