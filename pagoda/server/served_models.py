"""ServedModels: the models of a server, by their names, and what is asked of all of them together."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

from pagoda.base.abbreviate import abbreviate, shorten
from pagoda.base.errors import PagodaError
from pagoda.metrics.counts import ModelCounts
from pagoda.metrics.known_tokens import KnownTokens
from pagoda.metrics.observed_requests import Alike, RequestDetails, RequestRecord, oldest_of
from pagoda.server.errors import ApiError
from pagoda.server.model_loader import ModelLoader
from pagoda.server.served_adapters import AdapterChange, Failure
from pagoda.server.served_model import PickedModel, ServedModel

T = TypeVar("T")


class ServedModels:
    """The models of a server; requests that name none get the first.   loader: of their engines, if they have some."""

    def __init__(self, models: Sequence[ServedModel], loader: ModelLoader | None = None) -> None:
        self.loader = loader
        self.all = tuple(models)
        self.first = self.all[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of all models and of their adapters."""
        return tuple(name for _, name in self.by_name)

    @property
    def by_name(self) -> list[tuple[ServedModel, str]]:
        """Each model with each of its names."""
        return [(model, name) for model in self.all for name in model.all_names]

    def pick(self, name: str | None) -> PickedModel:
        """Return what a name stands for; None is the first model. Raises ApiError (404) for an unknown one."""
        if name is None:
            return PickedModel(self.first.name, self.first, None)
        for model in self.all:
            if (picked := model.find(name)) is not None:
                return picked
        text = f"unknown model {abbreviate(name)}; this server has {shorten(', '.join(self.all_names))}"
        raise ApiError(404, text, "model")

    def of(self, name: str | None) -> ServedModel:
        """Return the model of a name; the first if there is none."""
        return next((one for one in self.all if name in one.all_names), self.first)

    def of_record(self, record: RequestRecord) -> ServedModel:
        """Return the model of a request."""
        return next(one for one in self.all if one.name == record.model)

    @property
    def died(self) -> PagodaError | None:
        """Return why no request to any model can be served any more, None while some can."""
        return self.first.died if len(self.all) == 1 else None

    async def load(self, model: ServedModel) -> None:
        """Have a model loaded. Raises as ModelLoader.hold."""
        if self.loader is not None and model.loading is not None:
            await self.loader.load(model.loading)

    def unload_when_idle(self, model: ServedModel) -> None:
        """Unload a model of several when no request uses it."""
        if self.loader is not None and model.loading is not None:
            self.loader.unload_when_idle(model.loading)

    def end_waits(self, error: Exception, key: str | None = None) -> None:
        """End the wait for loads with an error.   key: only of requests of this key."""
        if self.loader is not None:
            self.loader.end_waits(error, key)

    # ---- what processes ask each other, see Peers

    def counts(self) -> ModelCounts:
        """Return what was counted of each model, by its name."""
        return {one.name: one.starter.metrics.counts() for one in self.all}

    def oldest(self) -> RequestRecord | None:
        """Return the request that runs for longest."""
        return oldest_of(one.starter.observed.oldest() for one in self.all)

    def requests(self, prefix: str, with_ended: bool) -> list[RequestRecord]:
        """Return the requests whose ids begin with a prefix.   with_ended: those that have ended, too."""
        return [*_chained(one.starter.observed.requests(prefix, with_ended) for one in self.all)]

    def details(self, request_id: str) -> RequestDetails | None:
        """Return what is known of the last request of an id."""
        found = (one.starter.observed.details(request_id) for one in self.all)
        known = [one for one in found if one is not None]
        return max(known, key=lambda one: one.record.arrived_s, default=None)

    def most_alike(self, model: str, prefix: str, arrived_s: float, tokens: KnownTokens) -> Alike | None:
        """Return the request to a model that begins most like these tokens, see ObservedRequests."""
        observed = next(one.starter.observed for one in self.all if one.name == model)
        return observed.most_alike(prefix, arrived_s, tokens)

    async def abort(self, request_ids: set[str] | None, key: str | None) -> list[str]:
        """Abort requests, see RequestStarter."""
        return [*_chained([await one.starter.abort(request_ids, key) for one in self.all])]

    async def change_adapter(self, change: AdapterChange) -> Failure | None:
        """Change an adapter of the model that its change is about. Return the error, if there is one."""
        about = change.name if change.removes else change.copy_of or (change.module and change.module.parent)
        model = self.of(about)
        if not change.removes and any(change.name in one.all_names for one in self.all if one is not model):
            return 400, f"{abbreviate(change.name)} is a name of another model; choose another", "lora_name"
        return await model.adapters.try_to(change)


def _chained(several: Iterable[Iterable[T]]) -> Iterable[T]:
    return itertools.chain.from_iterable(several)
