"""The LoRA adapters that a server has, and the names that were given to it or to them besides."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pagoda.base.abbreviate import abbreviate
from pagoda.base.errors import CapacityError, ConfigError, RequestError, WorkerDied
from pagoda.base.lora import LoRARequest, LoRASources
from pagoda.engine.async_engine import AsyncEngine
from pagoda.engine.inputs.adapters import Adapter
from pagoda.loading.adapters.config import CONFIG_FILE
from pagoda.loading.adapters.files import WEIGHTS_FILE
from pagoda.server.errors import ApiError, as_api_error

_MOST_NAMES = 1000
"""Names of adapters and copies."""


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """An adapter to serve under a name.   parent: the model that /v1/models names as the one it adapts."""

    name: str
    path: str
    parent: str | None = None


def parse_module(text: str) -> LoRAModule:
    """Parse a value of `lora_modules`: NAME=PATH, or an object with name, path and base_model_name.

    Raises ConfigError.
    """
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(f"lora_modules={abbreviate(text)} must be NAME=PATH, or a JSON object with name and path")
        return LoRAModule(name, path)
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"lora_modules={abbreviate(text)} is not valid JSON: {error}") from None
    known = {"name", "path", "base_model_name"}
    is_valid = {"name", "path"} <= values.keys() <= known and all(isinstance(v, str) for v in values.values())
    if not is_valid:
        raise ConfigError(
            f"lora_modules={abbreviate(text)} must have the strings name and path, and may have base_model_name"
        )
    return LoRAModule(values["name"], values["path"], values.get("base_model_name"))


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """What requests choose by a name.   lora: None: the model itself, under another name."""

    lora: Adapter | None
    parent: str


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """A module that is loaded, a name that is given to what another name stands for, or else a name that is removed.

    replaces: the name may be in use.
    """

    name: str
    module: LoRAModule | None = None
    replaces: bool = False
    copy_of: str | None = None

    @property
    def removes(self) -> bool:
        return self.module is None and self.copy_of is None

    def named(self, name: str) -> "AdapterChange":
        """Return the same for another name, which may be in use."""
        module = None if self.module is None else replace(self.module, name=name)
        return replace(self, name=name, module=module, replaces=True)


Failure = tuple[int, str, str | None]
"""The status, message and field of an ApiError."""


class ServedAdapters:
    """The adapters of a server and other names of its model, by name. A name is free again as soon as it is removed."""

    def __init__(self, llm: AsyncEngine, model_names: tuple[str, ...], lora_dir: str | None) -> None:
        """model_names: of the model itself; no adapter may have one of them.

        lora_dir: adapters are loaded from below it; None: none may be loaded while serving.
        """
        self._llm = llm
        self._model_names = model_names
        self._root = None if lora_dir is None else Path(lora_dir).resolve()
        self._by_name: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()

    @property
    def by_name(self) -> Mapping[str, ServedAdapter]:
        return self._by_name

    async def load_modules(self, sources: LoRASources) -> None:
        """Load the adapters of the settings. Raises ConfigError for one that cannot be used."""
        if self._root is not None and not self._root.is_dir():
            raise ConfigError(f"lora_dir={abbreviate(sources.lora_dir)} is not a folder")
        for text in sources.lora_modules:
            module = parse_module(text)
            try:
                self._check_name(module.name)
                await self._load(module)
            except (ApiError, RequestError) as error:
                raise ConfigError(f"lora_modules={abbreviate(text)}: {error}") from None

    def change_to(self, name: str, path: str, parent: str | None, replaces: bool) -> AdapterChange:
        """Return the change that loads an adapter from below `lora_dir`.

        replaces: the name may be in use; its new requests use this adapter then.
        Raises ApiError (400) that names what is wrong with the path.
        """
        return AdapterChange(name, LoRAModule(name, str(self._inside(path)), parent), replaces)

    async def apply(self, change: AdapterChange) -> None:
        """Load an adapter; or remove one: requests that use it finish, and no new one can.

        Raises ApiError (400, 404) that names what is wrong with the name or the files.
        """
        name, module = change.name, change.module
        async with self._changing:
            if module is not None:
                self._check_name(name, change.replaces)
                try:
                    await self._load(module)
                except RequestError as error:
                    raise ApiError(400, str(error), "lora_path") from None
            elif change.copy_of is not None:
                self._copy(name, change.copy_of)
            elif name not in self._by_name:
                raise ApiError(404, f"no LoRA adapter is named {abbreviate(name)}", "lora_name")
            else:
                self._free(self._by_name.pop(name).lora)

    async def try_to(self, change: AdapterChange) -> Failure | None:
        """Apply a change. Return the error, if there is one."""
        try:
            await self.apply(change)
        except (ApiError, RequestError, CapacityError, WorkerDied) as error:
            known = as_api_error(error)
            return known.status, known.message, known.param
        return None

    def _copy(self, name: str, source: str) -> None:
        if name in self._model_names:
            raise ApiError(400, f"{abbreviate(name)} is the name of the model", "destination")
        if name not in self._by_name and len(self._by_name) >= _MOST_NAMES:
            raise ApiError(400, f"there are {_MOST_NAMES} names already; delete some", "destination")
        model = ServedAdapter(None, self._model_names[0])
        served = model if source in self._model_names else self._by_name.get(source)
        if served is None:
            raise ApiError(404, f"nothing is named {abbreviate(source)}", "source")
        before = self._by_name.get(name)
        self._by_name[name] = served
        if before is not None:
            self._free(before.lora)

    async def _load(self, module: LoRAModule) -> None:
        lora = await self._llm.text.find_adapter(LoRARequest(module.name, 1, module.path))
        await self._llm.load_adapter(lora)
        before = self._by_name.get(module.name)
        self._by_name[module.name] = ServedAdapter(lora, module.parent or self._model_names[0])
        if before is not None:
            self._free(before.lora)

    def _free(self, lora: Adapter | None) -> None:
        """Unload an adapter, unless it has another name, too."""
        kept = {served.lora.identity for served in self._by_name.values() if served.lora is not None}
        if lora is not None and lora.identity not in kept:
            self._llm.unload_adapter(lora)

    def _check_name(self, name: str, replaces: bool = False) -> None:
        if name in self._model_names:
            raise ApiError(400, f"{abbreviate(name)} is the name of the model; give the adapter another", "lora_name")
        if name in self._by_name and not replaces:
            raise ApiError(
                400,
                f"an adapter named {abbreviate(name)} is loaded; unload it first, or set load_inplace",
                "lora_name",
            )

    def _inside(self, path: str) -> Path:
        """Return the adapter's folder. Raises ApiError (400) unless it and its files are below `lora_dir`."""
        root = self._root
        if root is None:
            raise ApiError(400, "this server loads no adapters: start it with --enable-lora and --lora-dir FOLDER")
        try:
            folder = root.joinpath(path).resolve()
            files = [folder, *((folder / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE))]
            is_inside = all(file.is_relative_to(root) for file in files) and folder != root
            is_folder = folder.is_dir()
        except (OSError, ValueError, RuntimeError):  # too long, a null character, a loop of links
            is_inside = is_folder = False
        if not is_inside:
            raise ApiError(
                400, f"lora_path {abbreviate(path)} is not a folder below the server's --lora-dir", "lora_path"
            )
        if not is_folder:
            raise ApiError(404, f"lora_path {abbreviate(path)}: there is no such folder below --lora-dir", "lora_path")
        return folder
