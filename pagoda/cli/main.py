"""The `pagoda` command. Each subcommand is imported when it is called, and imports what it needs when it runs."""

import importlib
import itertools
import logging
import os
import sys
from enum import Enum
from importlib.metadata import version
from typing import Annotated

import typer

from pagoda.base.abbreviate import shorten
from pagoda.base.errors import ConfigError, PagodaError, RequestError
from pagoda.cli import hints
from pagoda.cli.help_format import Group, command

SERVE_MODULES = ("aiohttp", "prometheus_client", "starlette", "uvicorn", "zmq")
"""Modules of the extra "serve", which the library alone does not need."""
COMPLETE_VARIABLE = "_PAGODA_COMPLETE"
"""Set by a shell's completion script."""
_ANY_WIDTH = 10_000  # of help in a file or pipe
_LONGEST_MESSAGE = 2000  # characters: an error is a message, never a dump of its input


class Shell(Enum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


COMMANDS: dict[str, str] = {
    "run": "pagoda.cli.generate",
    "generate": "pagoda.cli.generate",
    "chat": "pagoda.cli.chat",
    "transcribe": "pagoda.cli.transcribe",
    "serve": "pagoda.cli.serve",
    "run-batch": "pagoda.cli.run_batch",
    "launch": "pagoda.cli.launch",
    "top": "pagoda.cli.top",
    "plan": "pagoda.cli.plan",
    "replay": "pagoda.cli.replay",
    "doctor": "pagoda.cli.doctor",
}
"""The module of each command, whose function has the command's name, with underscores."""
GROUPS = {"models": "pagoda.cli.models", "bench": "pagoda.cli.bench"}
"""The module of each group of commands, which has them as its `app`."""


OF_MODELS = ("pull", "list", "show", "rm", "ps")
"""The commands of the group "models", which are commands by themselves, too."""


def make_app(only: str | None = None) -> typer.Typer:
    """Return the command line. With `only`, it has that command or group: the flags of all take 0.3 s to declare."""
    app = typer.Typer(
        name="pagoda",
        cls=Group,
        help="Run, serve and measure large language models.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(configure)
    for name, module in COMMANDS.items():
        if only in (None, name):
            command(app, name)(getattr(importlib.import_module(module), name.replace("-", "_")))
    if only in (None, *OF_MODELS):
        models = importlib.import_module(GROUPS["models"])
        for one in models.app.registered_commands:
            if one.name in OF_MODELS and only in (None, one.name):
                app.command(one.name)(one.callback)
    if only is None:
        app.command("completion")(completion)
    for name, module in GROUPS.items():
        if only in (None, name):
            app.add_typer(importlib.import_module(module).app, name=name)
    return app


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to complete commands and flags in.")]) -> None:
    """Print a shell's completion script: `source <(pagoda completion bash)`."""
    from typer.completion import shell_complete

    shell_complete(typer.main.get_command(make_app()), {}, "pagoda", COMPLETE_VARIABLE, f"source_{shell.value}")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagoda {version('pagoda-llm')}")
        raise typer.Exit


def configure(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
) -> None:
    """Set up logging to standard error, for every subcommand."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("pagoda").setLevel(logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING)


def main(arguments: list[str] | None = None) -> None:
    """Run one command line and exit: 0 done, 2 wrong input, 1 anything else, 130 interrupted. An error is one line."""
    given = sys.argv[1:] if arguments is None else arguments
    sys.exit(_run(_words_only(_general_first(given))))


def _general_first(arguments: list[str]) -> list[str]:
    """Return a command line with --debug and --verbose, which belong to no command, in front."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    general = [word for word in arguments[:end] if word in ("--debug", "--verbose")]
    return [*general, *(word for word in arguments[:end] if word not in general), *arguments[end:]]


def _words_only(arguments: list[str]) -> list[str]:
    """Return a command line of pull, show or rm without llama.cpp's flags in front of a model: it is a word there."""
    if {"pull", "show", "rm"}.isdisjoint(arguments[:2]):
        return arguments
    return [word for word in arguments if word not in ("-hf", "-hfr", "--hf-repo")]


def _run(arguments: list[str]) -> int:
    try:
        if "bench" in arguments:
            from pagoda.cli import bench

            bench.mount_scheduler()
        if COMPLETE_VARIABLE in os.environ or "completion" in arguments:
            from typer.completion import get_completion_inspect_parameters

            get_completion_inspect_parameters()  # registers the shells, which an app without --show-completion does not
        width = None if sys.stdout.isatty() else _ANY_WIDTH
        app = make_app(_named(arguments))
        return int(app(arguments, prog_name="pagoda", standalone_mode=False, terminal_width=width) or 0)
    except typer.TyperException as error:  # a flag or command that does not exist, a value of the wrong type
        message = error.format_message()
        if message.startswith("Usage:"):  # no command was given: the help is the answer
            print(message)
            return error.exit_code
        if (option := getattr(error, "option_name", None)) is not None:
            is_clients = _named(arguments) == "launch"
            message += "; a client's arguments come after --" if is_clients else hints.instead(option, hints.FLAGS)
        elif message.startswith("No such command"):
            message = message.rstrip(".") + hints.instead(message.split("'")[1], hints.COMMANDS)
        return _fail(message, error.exit_code) if message else error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone; flushing would make Python print an error
        return 1
    except PagodaError as error:
        if "--debug" in arguments:
            raise
        return _fail(str(error), 2 if isinstance(error, (ConfigError, RequestError)) else 1)
    except Exception as error:
        if "--debug" in arguments:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name in SERVE_MODULES:
            return _fail(
                f"this command needs the package {error.name}, which is not installed: install the server, too, "
                f"`{sys.executable} -m pip install '.[serve]'` in a checkout, or a wheel's path with [serve] after it",
                1,
            )
        return _fail(f"internal error: {type(error).__name__}: {error} (pagoda --debug ... shows where)", 1)


def _named(arguments: list[str]) -> str | None:
    """Return the command or group that a command line begins with, None if it has none or needs to know of all."""
    flags = list(itertools.takewhile(lambda one: one.startswith("-"), arguments))
    word = next(iter(arguments[len(flags) :]), None)
    is_about_all = COMPLETE_VARIABLE in os.environ or not {"-h", "--help"}.isdisjoint(flags)
    return None if is_about_all or word not in {*COMMANDS, *OF_MODELS, *GROUPS} else word


def _fail(message: str, code: int) -> int:
    print(f"pagoda: {shorten(' '.join(message.split()), _LONGEST_MESSAGE)}", file=sys.stderr)
    return code
