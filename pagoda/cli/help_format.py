"""Commands as `pagoda` registers them: how their help is formatted, and what is said about flags they do not have."""

from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pagoda.base.config import RETIRED
from pagoda.base.errors import ConfigError
from pagoda.cli.options import PANEL_ORDER

_ANY_LENGTH = 10_000


class Command(TyperCommand):
    """A command whose help lists its own options, then sampling, the most used settings, and the rest by group.

    The help is plain text, so that no flag is cut at 80 columns or in a pipe. Flags may be written with underscores.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. An error for a flag of earlier versions says what replaced it."""
        flags = {flag for item in self.get_params(ctx) for flag in (*item.opts, *item.secondary_opts)}
        try:
            return super().parse_args(ctx, [_with_dashes(arg, flags) for arg in args])
        except typer.TyperException as error:
            flag = getattr(error, "option_name", None)  # of an unknown option
            replaced = _replacement(flag, flags) if isinstance(flag, str) else ""
            if replaced:
                raise ConfigError(replaced) from None
            raise

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


class Group(TyperGroup):
    """A group whose help gives each command's first sentence whole, wrapped where a terminal is narrow."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(_ANY_LENGTH)) for name, one in commands if one and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _with_dashes(argument: str, flags: Collection[str]) -> str:
    """Return the argument with dashes for underscores in its name, if that makes it a known flag."""
    name, equals, value = argument.partition("=")
    dashed = name.replace("_", "-")
    return dashed + equals + value if name.startswith("--") and name not in flags and dashed in flags else argument


def _replacement(flag: str, flags: Collection[str]) -> str:
    """Return what to say about an unknown flag that is a field of a group, or that is gone; else an empty string."""
    name = flag.removeprefix("--").replace("-", "_")
    gone = next((option for option in (name, name.removeprefix("no_")) if option in RETIRED), None)
    if gone is not None:
        return f"the flag {flag} is gone: {RETIRED[gone]}; leave it out"
    of_field = next((known for known in sorted(flags) if known.endswith("." + flag.removeprefix("--"))), None)
    return f"{flag} is now {of_field}" if of_field else ""


def command(app: typer.Typer, name: str, **named: Any) -> Any:
    """Register a function as the command `name` of `app`, with help as this module formats it."""
    return app.command(name, cls=Command, **named)
