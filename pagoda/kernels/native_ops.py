"""NativeOps: the compiled CPU kernels. Its forward ops are generated from the op table."""

import os
from collections.abc import Sequence
from ctypes import addressof, byref, c_int32, c_int64
from functools import partial, partialmethod

import torch

from pagoda.kernels.batch import AttentionMetadata
from pagoda.kernels.collectives.shared_memory import check_groups
from pagoda.kernels.kv_cache.device_blocks import DeviceBlocks
from pagoda.kernels.linear.packed import PackedLinears
from pagoda.kernels.low_rank.packed import PackedLowRank
from pagoda.kernels.native.abi import NO_CACHE, CheckResult, Shared
from pagoda.kernels.native.arguments import Call, new_group, prepare_call, torch_facts
from pagoda.kernels.native.checks import bad_group, bad_index
from pagoda.kernels.native.dtypes import TORCH_DTYPES
from pagoda.kernels.native.library import NativeLibrary
from pagoda.kernels.reference_ops import reference_of
from pagoda.kernels.sampling.native import NativeSampling
from pagoda.ops.declare import Group, Op, Rows, Slots
from pagoda.ops.forward import OP_TABLE


class NativeOps:
    """`Ops` on a CPU. Every row's bits depend on that row alone.

    threads: how many threads a kernel uses, of the kernels' own pool (native/parallel.h), not of torch's.
    """

    name = "native"
    packs_weights = True
    make_device_blocks = DeviceBlocks

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self.library = library
        self.threads = threads
        self.linears = PackedLinears(library, threads)
        self.prepare_linear = self.linears.prepare
        self.prepare_stacked = self.linears.prepare_stacked
        self.prepare_quantized_linear = self.linears.prepare_quantized_linear
        self.prepare_experts = self.linears.prepare_experts
        self.table_of = self.linears.table_of
        self.make_low_rank_table = partial(PackedLowRank, library, threads)
        sampling = NativeSampling(library, threads)
        self.constrain = sampling.constrain
        self.best_tokens = sampling.best_tokens
        self.sample = sampling.sample
        self.process_logits = sampling.process_logits
        self.top_logprobs = sampling.top_logprobs
        self.mask_logits = sampling.mask_logits

    def _run(self, op: Op, *args: object, **kwargs: object) -> object:
        """Call an op's kernel; return its result: a tensor, a tuple of tensors, or None."""
        arguments = op.bind(args, kwargs)
        groups: list[Shared] = []

        def group_address(metadata: AttentionMetadata) -> int:
            groups.append(new_group(metadata))
            return addressof(groups[-1])

        call = prepare_call(op, arguments, torch_facts, group_address)
        self._set_rows(call, arguments)
        self._check(call, arguments, groups)
        outputs: list[torch.Tensor] = []
        for name, out in op.outputs.items():
            row_shape, dtype = call.output(out)
            outputs.append(torch.empty((call.shapes[out.rows][0], *row_shape), dtype=TORCH_DTYPES[dtype]))
            record = getattr(call.record, name)
            record.data, record.rows = outputs[-1].data_ptr(), outputs[-1].shape[0]
        self.library[op.name](byref(call.record), self.threads)
        check_groups(call.kept)
        if len(outputs) > 1:
            return tuple(outputs)
        return outputs[0] if outputs else None

    def _set_rows(self, call: Call, arguments: dict[str, object]) -> None:
        counts: dict[str, int] = {}
        for name, declared in call.op.arguments.items():
            if isinstance(declared, Rows):
                tensor = arguments[name]
                assert isinstance(tensor, torch.Tensor)  # torch_facts has checked it
                record = getattr(call.record, name)
                record.data, record.rows = tensor.data_ptr(), tensor.shape[0]
                if not declared.any_domain:
                    counts[name] = tensor.shape[0]
        if len(set(counts.values())) > 1:
            raise ValueError(f"{call.op.name}: arguments of different numbers of rows: {counts}")

    def _check(self, call: Call, arguments: dict[str, object], groups: list[Shared]) -> None:
        """Raise InvariantBroken for an index, a block or a slot outside the memory that the kernel may access."""
        at = c_int64()
        for name, declared in call.op.arguments.items():
            if isinstance(declared, Rows) and declared.below is not None:
                record, limit = getattr(call.record, name), call.shapes[declared.below][0]
                check, tensor = self.library["check_indices"], arguments[name]
                assert isinstance(tensor, torch.Tensor)
                if check(record.data, record.dtype, tensor.numel(), limit, byref(at)) != CheckResult.NOTHING:
                    raise bad_index(f"{call.op.name}: {name}", int(tensor.view(-1)[at.value]), at.value, limit)
            if isinstance(declared, Group):
                num_blocks = NO_CACHE if declared.cache is None else getattr(call.record, declared.cache).num_blocks
                rows = next(call.shapes[name][0] for name, what in call.op.arguments.items() if isinstance(what, Rows))
                queries, written = (rows, 0) if declared.rows is Slots.QUERIES else (-1, rows)
                bad = self.library["check_group"](addressof(groups[0]), num_blocks, queries, written, byref(at))
                if bad != CheckResult.NOTHING:
                    raise bad_group(bad, at.value, num_blocks)

    def plain_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """See CacheOps. The layout that the kernels write is that of kv_cache/pages.h."""
        num_blocks, num_heads, block_size, dim = pages.shape
        pair = 1 if pages.dtype in (torch.float32, torch.float16) else 2  # adjacent dimensions, then the slots
        return pages.view(num_blocks, num_heads, dim // pair, block_size, pair).transpose(2, 3).reshape(pages.shape)

    def pin_threads(self, cores: Sequence[Sequence[int]]) -> bool:
        """Pin the calling thread to the first of `cores` (a list of CPUs each) and the kernels' threads to the others.

        Return False if the system does not allow it; then no thread is pinned.
        """
        try:
            before = os.sched_getaffinity(0)
            # Pin the caller last: threads that start later inherit its mask.
            pinned = all(self._pin_worker(thread, cpus) for thread, cpus in enumerate(cores) if thread)
            if pinned:
                os.sched_setaffinity(0, cores[0])
        except (AttributeError, OSError):
            return False
        if not pinned:
            for thread in range(1, len(cores)):
                self._pin_worker(thread, sorted(before))
        return pinned

    def _pin_worker(self, thread: int, cpus: Sequence[int]) -> bool:
        return self.library["pin_thread"](thread, (c_int32 * len(cpus))(*cpus), len(cpus))


# Methods of the class, not of each object: one that refers to itself would hold its packed weights until Python looks
# for such circles.
for _op in OP_TABLE.values():
    # Views need no kernel: torch's are the same tensors.
    setattr(
        NativeOps,
        _op.name,
        partialmethod(NativeOps._run, _op) if _op.slices is None else staticmethod(reference_of(_op)),
    )
