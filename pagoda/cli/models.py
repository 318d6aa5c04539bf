"""`pagoda models`: what can be called by name, and what is fetched already."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="List and fetch models.", no_args_is_help=True)

CacheDir = Annotated[str | None, typer.Option("--cache-dir", help="Where fetched models are kept.")]


@app.command("list")
def list_models(cache_dir: CacheDir = None) -> None:
    """Print the models that go by a short name, and all that the cache holds."""
    from rich.table import Table

    from pagoda.base.config import ModelConfig
    from pagoda.cli.console import human_bytes, stdout_console
    from pagoda.loading.catalog import CATALOG
    from pagoda.loading.fetch_wheel import WheelRequirement, find_cached
    from pagoda.loading.resolve import cache_dir_of

    root = cache_dir_of(ModelConfig(cache_dir=cache_dir))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "size", "license", "what", "fetched"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    listed: set[Path] = set()
    for name in CATALOG:
        model = CATALOG[name]
        folder = find_cached(WheelRequirement.parse(model.requirement), root)
        if folder is not None:
            listed.add(folder)
        table.add_row(name, human_bytes(model.num_bytes), model.license, model.summary, "yes" if folder else "no")
    for folder, num_bytes in cached_folders(root):
        if folder not in listed:
            package, _, package_version = folder.name.rpartition("-")
            table.add_row(f"pypi:{package}=={package_version}", human_bytes(num_bytes), "", "", "yes")
    console = stdout_console()
    console.print(table)
    console.print(f"\ncache: {root}", highlight=False, style="dim", soft_wrap=True)


@app.command("pull")
def pull(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="What to fetch (default: the default model).")
    ] = None,
    cache_dir: CacheDir = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    source: Annotated[str, typer.Option(help="Hub for ids: huggingface or modelscope.")] = "huggingface",
) -> None:
    """Fetch models into the cache and print where they are. What is there already needs no network."""
    from pagoda.base.config import ModelConfig
    from pagoda.cli.console import fetching
    from pagoda.loading.resolve import resolve_model

    for name in names or [ModelConfig().model]:
        config = ModelConfig(model=name, cache_dir=cache_dir, revision=revision, source=source)
        with fetching():
            files = resolve_model(config)
        print(f"{name}\t{files.path}")


def cached_folders(root: Path) -> list[tuple[Path, int]]:
    """Folders of fetched wheels with their size in bytes, by name."""
    folders = sorted(path for path in (root / "wheels").glob("[!.]*") if path.is_dir())
    return [(folder, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())) for folder in folders]
