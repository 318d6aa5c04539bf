"""What an engine that replaces a dead one is told: the sizes that the first one has found."""

import pytest

from pagoda.assembly.engine_setup import resolve_engine
from pagoda.assembly.sizing import fit_cache
from pagoda.base.config import EngineConfig
from pagoda.base.config_rules import settings_without_effect
from pagoda.engine.wire import EngineSizes
from tests.cached_models import cached_model

SIZES = EngineSizes(1024, 16, 100, 7, 4, 64)


@pytest.mark.parametrize("options", [{}, {"kv_cache_memory": "64MiB"}, {"max_num_seqs": 8, "max_model_len": 2000}])
def test_the_next_engine_has_the_sizes_of_the_first(options: dict[str, object]) -> None:
    config = SIZES.settle(EngineConfig.from_options(model=str(cached_model("smollm2-135m").path), **options))
    setup, capacity = fit_cache(resolve_engine(config))
    assert (capacity.num_blocks, capacity.num_host_blocks, setup.max_model_len) == (100, 7, 1024)
    scheduler = setup.config.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (4, 64)
    assert not settings_without_effect(setup.config), "the operator has done nothing wrong"


def test_a_setup_resolves_to_itself_in_another_process() -> None:
    setup = resolve_engine(EngineConfig.from_options(model=str(cached_model("smollm2-135m").path), max_num_seqs=8))
    again = resolve_engine(setup.config)
    assert (again.config, again.dtype, again.kv_dtype) == (setup.config, setup.dtype, setup.kv_dtype)
