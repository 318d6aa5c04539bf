"""Engines without a model: the real core and scheduler over FakeExecutor, a byte a token."""

from pagoda.base.clock import SystemClock
from pagoda.base.config import CacheConfig
from pagoda.base.request_limits import RequestLimits
from pagoda.core.kv import KVGroupSpec
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.executor import Executor
from pagoda.engine.inputs.input_limits import InputLimits
from pagoda.engine.inputs.input_processor import InputProcessor
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from pagoda.engine.wire import EngineSizes
from pagoda.executors.fake import FakeExecutor

MAX_LEN = 256
NUM_BLOCKS = 256
DEFAULT_LIMITS = RequestLimits()


def fake_core(
    executor: Executor | None = None,
    max_num_seqs: int = 8,
    step_s: float = 0.0,
    depth: int = 1,
    num_blocks: int = NUM_BLOCKS,
) -> EngineCore:
    """A started core; `executor` instead of the fake one.   depth: steps in flight, scheduled asynchronously."""
    scheduler_config = SchedulerOptions(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=64, pipeline_depth=depth, async_scheduling=depth > 1
    )
    clock = SystemClock()
    scheduler = Scheduler(scheduler_config, CacheConfig(), (KVGroupSpec(),), num_blocks, MAX_LEN, clock)
    executor = executor or FakeExecutor(scheduler.max_rows, MAX_LEN, vocab_size=258, step_s=step_s)
    executor.start()
    executor.set_pools(num_blocks, 0)
    return EngineCore(scheduler, executor, clock, EngineSizes(MAX_LEN, 16, num_blocks, 0), 258, depth)


def byte_inputs(of_request: RequestLimits = DEFAULT_LIMITS) -> InputProcessor:
    limits = InputLimits(258, MAX_LEN, 8, of_request=of_request)
    return InputProcessor(ByteTokenizer(), limits, engine_seed=0)
