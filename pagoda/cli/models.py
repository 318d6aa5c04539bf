"""`pagoda models`: list, show, fetch and remove models, and what a server has. Each is a command of `pagoda`, too."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pagoda.base.abbreviate import human_bytes, shorten
from pagoda.base.errors import PagodaError, RequestError
from pagoda.cli.help_format import LOCAL_SERVER, ApiKey, CacheDir, Group, JsonObject, Url

app = typer.Typer(cls=Group, help="List, show, fetch and remove models.", no_args_is_help=True, rich_markup_mode=None)

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Source = Annotated[str, typer.Option(help="Hub that model ids refer to: huggingface or modelscope.")]


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of the catalog or the cache.   path: where it is; None: not fetched.

    num_bytes: of its weights.   memory_bytes: see ModelFacts; 0 if it is not known.
    """

    name: str
    kind: str
    reads: str
    num_bytes: int
    memory_bytes: int
    license: str
    summary: str
    path: str | None


@app.command("list")
def list_models(cache_dir: CacheDir = None, as_json: JsonObject = False) -> None:
    """List the models of the catalog and those in the cache: what they are for, and the memory they need."""
    from pagoda.base.config import ModelConfig
    from pagoda.loading.known_names import KNOWN_NAMES
    from pagoda.loading.resolve import cache_dir_of

    root = cache_dir_of(ModelConfig(cache_dir=cache_dir))
    found = find_models(cache_dir)
    if as_json:
        names = {name: asdict(known) for name, known in KNOWN_NAMES.items()}
        print(json.dumps({"cache": str(root), "models": [asdict(model) for model in found], "known_names": names}))
        return
    from pagoda.cli.console import print_table, stdout_console

    rows: list[tuple[str, ...]] = []
    for model in found:
        memory = human_bytes(model.memory_bytes) if model.memory_bytes else "?"
        sizes = human_bytes(model.num_bytes), memory
        is_there = "no" if model.path is None else "yes"
        rows.append((model.name, model.kind, model.reads, *sizes, model.license, model.summary, is_there))
    headings = ("name", "kind", "reads", "on disk", "in memory", "license", "what", "fetched")
    print_table(rows, headings, right=(3, 4))
    console = stdout_console()
    console.print(f"\nnames of other programs: {', '.join(KNOWN_NAMES)}", highlight=False)
    console.print(f"cache: {root}", highlight=False, style="dim", soft_wrap=True)


def find_models(cache_dir: str | None) -> list[ListedModel]:
    """Return the catalog's models, then what else is in the cache: of wheels, and of the hub's library."""
    from pagoda.base.config import ModelConfig
    from pagoda.loading.catalog import CATALOG
    from pagoda.loading.fetch_wheel import find_cached
    from pagoda.loading.hub_cache import cached_hub_models
    from pagoda.loading.resolve import cache_dir_of, hub_cache_of

    config = ModelConfig(cache_dir=cache_dir)
    root = cache_dir_of(config)
    found: list[ListedModel] = []
    listed: set[Path] = set()
    for name in CATALOG:
        model = CATALOG[name]
        folder = find_cached(model.wheel, root)
        listed |= {folder} if folder is not None else set()
        path = str(folder) if folder is not None else None
        found.append(_listed(name, cache_dir, model.num_bytes, path, model.license, model.summary))
    for folder, num_bytes in cached_folders(root):
        if folder not in listed:
            package, _, package_version = folder.name.rpartition("-")
            found.append(_listed(f"pypi:{package}=={package_version}", cache_dir, num_bytes, str(folder)))
    for name, path, num_bytes in cached_hub_models(hub_cache_of(config)):
        found.append(_listed(name, cache_dir, num_bytes, str(path)))
    return found


def _listed(
    name: str, cache_dir: str | None, num_bytes: int, path: str | None, license: str = "", summary: str = ""
) -> ListedModel:
    """Return a line of the list; a model that cannot be read has the reason as its summary."""
    from pagoda.base.config import EngineConfig
    from pagoda.cli.model_facts import facts_of

    try:
        facts = facts_of(EngineConfig.from_options(model=name, cache_dir=cache_dir))
    except PagodaError as error:
        return ListedModel(name, "?", "?", num_bytes, 0, license, summary or shorten(str(error)), path)
    return ListedModel(name, facts.kind, facts.reads, num_bytes, facts.memory_bytes, license, summary, path)


@app.command("families")
def families(as_json: JsonObject = False) -> None:
    """List the families of models that run: what a config.json and a GGUF file call them."""
    from pagoda.cli.console import print_table
    from pagoda.models.registry import FAMILIES

    rows = [
        (one.title or one.name, kind, ", ".join(one.gguf_names), ", ".join(one.hf_names))
        for kind, architectures in FAMILIES.items()
        for one in architectures
    ]
    headings = ("family", "kind", "gguf", "config.json")
    if as_json:
        print(json.dumps({"families": [dict(zip(headings, row, strict=True)) for row in rows]}))
    else:
        print_table(rows, headings)


@app.command("show")
def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model of the catalog or the cache.")],
    cache_dir: CacheDir = None,
    revision: Revision = None,
    source: Source = "huggingface",
    as_json: JsonObject = False,
) -> None:
    """Show what a model is: its kind, architecture, size, context, and where it is. Nothing is fetched."""
    from pagoda.base.config import EngineConfig
    from pagoda.cli.model_facts import facts_of
    from pagoda.loading.known_names import full_name
    from pagoda.loading.resolve import find_cached_model

    config = EngineConfig.from_options(model=model, cache_dir=cache_dir, revision=revision, source=source)
    facts = facts_of(config)
    path = find_cached_model(config.model)
    if as_json:
        where = None if path is None else str(path)
        print(json.dumps({"name": model, "stands_for": full_name(model), "path": where, **asdict(facts)}))
        return
    from pagoda.cli.console import human_count, print_table

    stands_for = f" ({full_name(model)})" if full_name(model) != model else ""
    rows = [
        ("model", model + stands_for),
        ("kind", facts.kind),
        ("reads", facts.reads),
        ("architecture", f"{facts.architecture}, {facts.num_parameters / 1e6:.1f} M parameters"),
        ("context", f"{human_count(facts.context)} tokens"),
        ("on disk", human_bytes(facts.num_bytes)),
        ("in memory", f"about {human_bytes(facts.memory_bytes)}; pagoda plan {model} has the details"),
        ("path", f"not fetched: pagoda pull {model}" if path is None else str(path)),
    ]
    print_table(rows)


@app.command("pull")
def pull(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Model to fetch (default: the default model).")
    ] = None,
    cache_dir: CacheDir = None,
    revision: Revision = None,
    source: Source = "huggingface",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Fetch large models without a question.")] = False,
) -> None:
    """Fetch models into the cache and print their folders. Cached models need no network."""
    from pagoda.base.config import ModelConfig
    from pagoda.cli.console import ask_before_fetching, fetching
    from pagoda.loading.resolve import resolve_model

    for name in names or [ModelConfig().model]:
        config = ModelConfig(model=name, cache_dir=cache_dir, revision=revision, source=source)
        ask_before_fetching(config, yes)
        with fetching():
            files = resolve_model(config)
        print(f"{name}\t{files.path}")


@app.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="MODEL", help="Model of the cache.")],
    cache_dir: CacheDir = None,
    revision: Revision = None,
    source: Source = "huggingface",
) -> None:
    """Delete fetched models from the cache. A folder or file that you named by its path is yours, and stays."""
    from pagoda.base.config import ModelConfig
    from pagoda.loading.resolve import remove_cached

    for name in names:
        config = ModelConfig(model=name, cache_dir=cache_dir, revision=revision, source=source)
        print(f"{name}\t{human_bytes(remove_cached(config))} freed")


@app.command("ps")
def ps(
    url: Url = LOCAL_SERVER,
    api_key: ApiKey = None,
    as_json: JsonObject = False,
) -> None:
    """List the models that a running server has loaded, and its requests. Another server than pagoda's will do."""
    from pagoda.cli.remote import ServerConnection

    server = ServerConnection(url, api_key)
    models, load = _loaded(server), _answer(server, "/load")
    if as_json:
        print(json.dumps({"models": models, "load": load}))
        return
    from pagoda.cli.console import for_stream, human_count, print_table

    rows: list[tuple[str, ...]] = []
    for model in models:
        size, context = model.get("size"), model.get("context_length")
        shown = (human_bytes(size) if size else "?", human_count(context) if context else "?")
        rows.append((for_stream(str(model["name"]), sys.stdout), *shown))
    print_table(rows, ("name", "size", "context"), right=(1, 2))
    if load is not None:
        print(f"\n{load['running']} requests run, {load['waiting'] + load['swapped']} wait")


def _loaded(server: Any) -> list[dict[str, Any]]:
    """Return what /api/ps lists, else the names of /v1/models. Raises ConfigError if a server has neither."""
    from pagoda.cli.remote import served_models

    found = _answer(server, "/api/ps")
    if found is not None and "models" in found:
        return found["models"]
    return [
        {"name": one["id"], "context_length": one.get("max_model_len")}
        for one in served_models(server)
        if one.get("status", {}).get("value", "loaded") == "loaded"
    ]


def _answer(server: Any, path: str) -> dict[str, Any] | None:
    """Return a route's JSON; None of a server that does not have it."""
    try:
        with server.open(path) as answer:
            return json.load(answer)
    except (RequestError, ValueError):
        return None


def cached_folders(root: Path) -> list[tuple[Path, int]]:
    """Folders of fetched wheels with their size in bytes, by name."""
    folders = sorted(path for path in (root / "wheels").glob("[!.]*") if path.is_dir())
    return [(folder, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())) for folder in folders]
