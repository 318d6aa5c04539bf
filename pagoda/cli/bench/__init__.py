"""`pagoda bench`: figures of the engine, one command each."""

import typer

from pagoda.cli.bench import serve, startup, throughput
from pagoda.cli.help_format import Group, command

app = typer.Typer(
    cls=Group,
    help="Measure throughput, latency, startup, server and scheduler.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
command(app, "throughput")(throughput.throughput)
command(app, "latency")(throughput.latency)
command(app, "startup")(startup.startup)
app.command("serve")(serve.bench_serve)


def mount_scheduler() -> None:
    """Add `bench scheduler`. Apart from the others: it imports the scheduler, which `--help` need not."""
    from pagoda.cli.bench import scheduler

    app.command("scheduler")(scheduler.bench_scheduler)
