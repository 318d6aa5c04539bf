"""Help pages: plain text, so that no flag is cut at 80 columns or in a pipe; groups in the order people need them."""

from typing import Any

import typer
from typer.core import TyperCommand

from pagoda.cli.options import PANEL_ORDER


class Command(TyperCommand):
    """A command whose help lists its own options, then sampling, the most used settings, and the rest by group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            "Options": [],
            **{name: [] for name in PANEL_ORDER},
        }
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            panel = getattr(parameter, "rich_help_panel", None)
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            groups[panel or default].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=34)


def command(app: typer.Typer, name: str, **named: Any) -> Any:
    """Register a function as the command `name` of `app`, with help as this module formats it."""
    return app.command(name, cls=Command, **named)
