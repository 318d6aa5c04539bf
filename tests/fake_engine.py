"""Engines without a model: the real core and scheduler over FakeExecutor, a byte a token."""

from pagoda.base.clock import SystemClock
from pagoda.base.config import CacheConfig
from pagoda.core.executor import Executor
from pagoda.core.kv_specs import KVGroupSpec
from pagoda.core.scheduler import Scheduler
from pagoda.core.scheduler_options import SchedulerOptions
from pagoda.engine.engine_core import EngineCore
from pagoda.engine.inputs.input_processor import InputLimits, InputProcessor
from pagoda.engine.tokenizers.byte_tokenizer import ByteTokenizer
from pagoda.engine.wire import EngineFacts
from pagoda.executors.fake import FakeExecutor

MAX_LEN = 256
NUM_BLOCKS = 256


def fake_core(
    executor: Executor | None = None, max_num_seqs: int = 8, step_s: float = 0.0, depth: int = 1
) -> EngineCore:
    """A started core; `executor` instead of the fake one.   depth: steps in flight, scheduled asynchronously."""
    scheduler_config = SchedulerOptions(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=64, pipeline_depth=depth, async_scheduling=depth > 1
    )
    clock = SystemClock()
    scheduler = Scheduler(scheduler_config, CacheConfig(), (KVGroupSpec(),), NUM_BLOCKS, MAX_LEN, clock)
    executor = executor or FakeExecutor(scheduler.max_rows, MAX_LEN, vocab_size=258, step_s=step_s)
    executor.start()
    return EngineCore(scheduler, executor, clock, EngineFacts(MAX_LEN, 16, NUM_BLOCKS, 0, 0.0), 258, depth)


def byte_inputs() -> InputProcessor:
    return InputProcessor(ByteTokenizer(), InputLimits(258, MAX_LEN, 8), engine_seed=0)
