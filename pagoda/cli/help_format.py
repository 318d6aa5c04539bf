"""Commands as `pagoda` registers them: how their help is formatted, and what is said about flags they do not have."""

from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from pagoda.base.errors import ConfigError
from pagoda.base.flat_options import RETIRED
from pagoda.base.vllm_options import answer_for_vllm
from pagoda.cli.options import PANEL_ORDER, flag_of

_ANY_LENGTH = 10_000
_TOO_MANY_ARGUMENTS = "Got unexpected extra argument"  # as click words it
_SHORT_FLAGS = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization"}
"""Short flags of vLLM that pagoda does not have."""


class Command(TyperCommand):
    """A command whose help lists its own options, then sampling, the most used settings, and the rest by group.

    The help is plain text, so that no flag is cut at 80 columns or in a pipe. Flags may be written with underscores.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. An error for a flag of earlier versions or of vLLM says what to use instead."""
        flags = {flag for item in self.get_params(ctx) for flag in (*item.opts, *item.secondary_opts)}
        try:
            rest = super().parse_args(ctx, [_with_dashes(arg, flags) for arg in args])
        except typer.TyperException as error:
            flag = getattr(error, "option_name", None)  # of an unknown option
            replaced = _replacement(flag, flags) if isinstance(flag, str) else ""
            short = next((f"write {_SHORT_FLAGS[arg]} for {arg}" for arg in args if arg in _SHORT_FLAGS), "")
            if replaced or short:
                raise ConfigError(replaced or short) from None
            if error.format_message().startswith(_TOO_MANY_ARGUMENTS) and "--model" in flags:
                raise ConfigError(
                    f"{error.format_message()}: give the model with -m, quote a text with spaces, and repeat a flag "
                    "to give it several values"
                ) from None
            raise
        return rest

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
    """Return the answer to an unknown flag that is a field of a group, gone, or vLLM's; else an empty string."""
    name = flag.removeprefix("--").replace("-", "_")
    field = name.rpartition(".")[2]
    gone = next((option for option in (field, field.removeprefix("no_")) if option in RETIRED), None)
    if gone is not None:
        return f"the flag {flag} is gone: {RETIRED[gone]}; leave it out"
    of_field = next((known for known in sorted(flags) if known.endswith("." + flag.removeprefix("--"))), None)
    if of_field:
        return f"{flag} is now {of_field}"
    answers = (answer_for_vllm(option, flag_of) for option in (name, name.removeprefix("no_")))
    answer = next((text for text in answers if text), None)
    return f"pagoda does not have vLLM's flag {flag}: {answer}" if answer else ""


def command(app: typer.Typer, name: str, **named: Any) -> Any:
    """Register a function as the command `name` of `app`, with help as this module formats it."""
    return app.command(name, cls=Command, **named)
