"""Commands as `pagoda` registers them: how they are parsed, and how their help is formatted."""

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pagoda.base.errors import ConfigError
from pagoda.base.sampling_params import SamplingParams
from pagoda.cli.options import MOST_USED, PANELS, PROMPT, SAMPLING_FIELDS

JsonObject = Annotated[bool, typer.Option("--json", help="Print a single JSON object.")]
CacheDir = Annotated[str | None, typer.Option("--cache-dir", help="Folder where downloaded models are kept.")]
Url = Annotated[str, typer.Option(help="The server.")]
LOCAL_SERVER = "http://127.0.0.1:8000"
ApiKey = Annotated[str | None, typer.Option(help="Its API key; of several the first.", envvar="PAGODA_API_KEY")]

_ANY_LENGTH = 10_000
_IN_GROUP = re.compile(r", --[\w-]+\.[\w.-]+")  # the longer spelling of a flag that has a short one
_SOURCES = "pagoda.sources"  # in a context's meta: where values are from that are not on the command line
_TOO_MANY_ARGUMENTS = "Got unexpected extra argument"  # as click words it


class Command(TyperCommand):
    """A command whose help lists its own options, then sampling, the most used settings, and the rest by group.

    The help is plain text, so that no flag is cut at 80 columns or in a pipe.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        for parameter in self.params:
            if not parameter.required and parameter.callback is None:
                _process_where_given(parameter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line over what the environment and a --config file say (see pagoda.cli.arguments)."""
        from pagoda.cli.arguments import outer_values, place_words, spelled_out

        parameters = {item.name: item for item in self.get_params(ctx)}
        if "config" not in parameters or ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        flags = {flag: item for item in parameters.values() for flag in (*item.opts, *item.secondary_opts)}
        flags = {flag: item for flag, item in flags.items() if flag.startswith("-")}
        args, used = spelled_out(args, flags, PROMPT in parameters)
        config = next((args[at + 1] for at, arg in enumerate(args[:-1]) if arg == "--config"), None)
        config = next((arg.partition("=")[2] for arg in args if arg.startswith("--config=")), config)
        if "--help" not in args and "-h" not in args:
            # Behind --url is an engine with settings of its own: those that are around are for engines of this machine.
            named = {n: p for n, p in parameters.items() if "url" not in used or n in SAMPLING_FIELDS}
            ctx.default_map, sources = outer_values(named, used, config)
            ctx.meta[_SOURCES] = {name: source for name, source in sources.items() if name not in used}
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            raise _with_source(ctx, getattr(error.param, "name", ""), error) from None
        except typer.TyperException as error:
            if error.format_message().startswith(_TOO_MANY_ARGUMENTS):
                raise ConfigError(f"{error.format_message()}: quote a text with spaces") from None
            raise
        place_words(ctx.params, "model" in used, prefers_model=self.name == "run")
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An error about a setting that is in a file or the environment says where."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise _with_source(ctx, re.split(r"[^\w.]", str(error))[0].replace(".", "__"), error) from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        names = ("Arguments", "Options", PANELS[SamplingParams], MOST_USED, *PANELS.values())
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            panel = getattr(parameter, "rich_help_panel", None)
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            names = _IN_GROUP.sub("", record[0])
            groups[panel or default].append((names, record[1]))
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=34)


def _process_where_given(parameter: Any) -> None:
    """Let a flag that is not given be absent at once.

    Typer would make a pydantic model of its type first: of an engine's 147 flags, that takes 0.08 s.
    """
    process, absent = parameter.process_value, () if parameter.multiple or parameter.nargs == -1 else None
    parameter.process_value = lambda ctx, value: absent if value is None else process(ctx, value)


def _with_source(ctx: Any, name: str, error: Exception) -> Exception:
    """Return an error about a setting with the file or variable that it is in; as it is for one of the command line."""
    source = ctx.meta.get(_SOURCES, {}).get(name)
    if source is None:
        return error
    text = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    return ConfigError(f"{source}: {text}")


class Group(TyperGroup):
    """A group whose help gives each command's first sentence whole, wrapped where a terminal is narrow."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(_ANY_LENGTH)) for name, one in commands if one and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def command(app: typer.Typer, name: str, **named: Any) -> Any:
    """Register a function as the command `name` of `app`, with help as this module formats it."""
    return app.command(name, cls=Command, **named)
