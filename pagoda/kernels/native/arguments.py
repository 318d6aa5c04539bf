"""Fill the struct that an op's kernel takes from its Python arguments, checked against the op's declaration.

Running op by op and recording share this: they differ only in what a Rows argument is, a torch tensor or a stand-in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from pagoda.base.errors import ConfigError
from pagoda.kernels.batch import AttentionMetadata, KVLayer
from pagoda.kernels.collectives.shared_memory import SharedGroup
from pagoda.kernels.linear.packed import PackedExperts, PackedTable, PackedWeight
from pagoda.kernels.low_rank.packed import PackedLowRank
from pagoda.kernels.native.abi import ARGS, Layout, RowGroup, Shared
from pagoda.kernels.native.dtypes import DTYPE_CODES, TORCH_DTYPES
from pagoda.ops.batch import AttentionMetadata as AnyMetadata
from pagoda.ops.batch import KVLayer as AnyKVLayer
from pagoda.ops.declare import Cache, DType, Experts, Group, LowRank, Op, Out, Packed, Ranks, Rows, Scalar, Table

MAX_HEAD_DIM = 512
TRANSIENT_BLOCK = 16  # as in attention/transient.h


@dataclass(frozen=True, slots=True)
class RowsFacts:
    """Shape and layout of a Rows argument. stride: elements from a row to the next.   dense: no gaps within a row."""

    shape: tuple[int, ...]
    dtype: DType
    stride: int
    dense: bool


@dataclass(slots=True)
class Call:
    """An op's arguments, complete except for the addresses of its rows.

    record: the argument struct.   shapes, dtypes: by argument; see declare.Shapes.   kept: what `record` points to.
    """

    op: Op
    record: Shared
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    dtypes: dict[str, DType] = field(default_factory=dict[str, DType])
    kept: list[object] = field(default_factory=list[object])

    def output(self, out: Out) -> tuple[tuple[int, ...], DType]:
        """Row shape and dtype of a result."""
        return out.row_shape(self.shapes), self.dtypes[out.rows] if out.dtype is None else self.dtype(out.dtype)

    def dtype(self, declared: DType | str) -> DType:
        return self.dtypes[declared] if isinstance(declared, str) else declared


def check_page_shape(head_dim: int, block_size: int) -> None:
    """Raise ConfigError for pages that the native kernels cannot read and write."""
    if head_dim % 16 or head_dim > MAX_HEAD_DIM or block_size % 8:
        raise ConfigError(
            f"native attention takes head sizes that are multiples of 16 up to {MAX_HEAD_DIM} and block sizes that are "
            f"multiples of 8, not {head_dim} and {block_size}; choose kernels='torch' or another block_size"
        )


def prepare_call(
    op: Op,
    arguments: Mapping[str, object],
    facts_of: Callable[[str, object], RowsFacts],
    group_address: Callable[[AttentionMetadata], int],
) -> Call:
    """Check `arguments` and fill the op's struct, all but `data` and `rows` of Rows arguments and of results.

    Raises ValueError for an argument that is not what the op declares, and ConfigError for pages that the kernels
    cannot use.
    """
    call = Call(op, ARGS[op.name]())
    for name, declared in op.arguments.items():
        value = arguments[name]
        match declared:
            case Rows():
                _set_rows(call, name, declared, facts_of(name, value))
            case Table():
                _set_table(call, name, declared, value)
            case Packed():
                _set_weight(call, name, declared.of, True, value, PackedWeight)
            case Experts():
                _set_weight(call, name, declared.of, declared.directly, value, PackedExperts)
            case LowRank():
                _set_low_rank(call, name, value)
            case Cache():
                set_cache = _set_states if declared.states else _set_cache
                set_cache(call, name, value)
            case Group():
                if not isinstance(value, AnyMetadata):
                    raise _wrong(op, name, "AttentionMetadata", value)
                if declared.cache is None:  # K and V are laid out as pages while the op runs, of heads of whole lanes
                    check_page_shape(-(-call.shapes["k"][2] // 16) * 16, TRANSIENT_BLOCK)
                setattr(call.record, name, group_address(value))
            case Ranks():
                if not isinstance(value, SharedGroup):
                    raise _wrong(op, name, "a SharedGroup", value)
                setattr(call.record, name, value.address)
                call.kept.append(value)
            case Scalar():
                setattr(call.record, name, value)
                if declared is Scalar.I32 and isinstance(value, int):
                    call.shapes[name] = (value,)
    if op.check is not None:
        op.check(call.shapes)
    for name, out in op.outputs.items():
        row_shape, dtype = call.output(out)
        set_tensor(getattr(call.record, name), row_shape, dtype)
    return call


def set_tensor(record: Shared, row_shape: tuple[int, ...], dtype: DType, stride: int | None = None) -> None:
    """Fill a Tensor struct except for `data` and `rows`.

    row_shape: (), (dim,) or (heads, dim).   stride: None where rows follow each other without gaps.
    """
    dim = row_shape[-1] if row_shape else 1
    heads = row_shape[0] if len(row_shape) == 2 else 1
    record.heads, record.dim, record.dtype = heads, dim, dtype
    record.stride = heads * dim if stride is None else stride


def fill_group(record: Shared, metadata: AttentionMetadata) -> None:
    """Fill a RowGroup struct. Raises ValueError for a tensor whose dtype or layout the kernels cannot read."""
    starts, lengths, table, slots = (
        metadata.query_start, metadata.seq_lens, metadata.block_table, metadata.slot_mapping
    )  # fmt: skip
    num_rows, (table_rows, table_width) = lengths.shape[0], table.shape
    fits = starts.dtype is lengths.dtype is table.dtype is torch.int32 and slots.dtype is torch.int64
    if not fits or not starts.stride(0) == lengths.stride(0) == table.stride(1) == slots.stride(0) == 1:
        raise ValueError(
            "AttentionMetadata must have query_start, seq_lens and block_table in torch.int32 and slot_mapping in "
            f"torch.int64, with adjacent elements, not {_describe(starts)}, {_describe(lengths)}, {_describe(table)} "
            f"and {_describe(slots)}"
        )
    if starts.shape[0] != num_rows + 1 or table_rows != num_rows:
        raise ValueError(
            f"AttentionMetadata of {num_rows} rows has {starts.shape[0]} query starts and {table_rows} block tables; "
            "it needs one start more than rows, and as many tables"
        )
    record.query_start, record.seq_lens = starts.data_ptr(), lengths.data_ptr()
    record.block_table, record.slot_mapping = table.data_ptr(), slots.data_ptr()
    record.last_seen = None
    if (last_seen := metadata.last_seen) is not None:
        if last_seen.dtype is not torch.int32 or not last_seen.is_contiguous():
            raise ValueError(f"last_seen of AttentionMetadata must be in torch.int32, not {_describe(last_seen)}")
        record.last_seen = last_seen.data_ptr()
    record.table_stride, record.table_width = table.stride(0), table_width
    record.block_size, record.num_rows, record.num_slots = metadata.block_size, num_rows, slots.shape[0]


def new_group(metadata: AttentionMetadata) -> Shared:
    record = RowGroup()
    fill_group(record, metadata)
    return record


def torch_facts(name: str, value: object) -> RowsFacts:
    """RowsFacts of a torch tensor. Raises ValueError for anything else."""
    if not isinstance(value, torch.Tensor) or value.dim() not in (1, 2, 3) or value.dtype not in DTYPE_CODES:
        raise ValueError(f"{name} must be a tensor of one to three dimensions, not {_describe(value)}")
    shape, strides = tuple(value.shape), value.stride()
    dense = all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(1, len(shape) - 1))
    return RowsFacts(shape, DTYPE_CODES[value.dtype], strides[0], dense and (len(shape) == 1 or strides[-1] == 1))


def _set_rows(call: Call, name: str, declared: Rows, facts: RowsFacts) -> None:
    op = call.op
    if declared.dtype is None:
        fits, wanted = facts.dtype.is_float, "a float dtype"
    else:
        wanted = call.dtype(declared.dtype)
        fits = facts.dtype == wanted
    if not fits:
        raise ValueError(f"{op.name}: {name} must be of {wanted!s}, not {facts.dtype.name}")
    row_elements = prod(facts.shape[1:])
    if not facts.dense or (declared.contiguous and facts.stride != row_elements and facts.shape[0] > 1):
        raise ValueError(
            f"{op.name}: {name} of shape {facts.shape} must be contiguous (its rows are {facts.stride} apart)"
        )
    if declared.like is not None and facts.shape != call.shapes[declared.like]:
        raise ValueError(
            f"{op.name}: {name} must have the shape of {declared.like}, {call.shapes[declared.like]}, not {facts.shape}"
        )
    call.shapes[name], call.dtypes[name] = facts.shape, facts.dtype
    set_tensor(getattr(call.record, name), facts.shape[1:], facts.dtype, facts.stride)


def _set_table(call: Call, name: str, declared: Table, value: object) -> None:
    if declared.optional and value is None:
        call.shapes[name] = ()
        return
    if declared.packed and isinstance(value, PackedTable):
        record = getattr(call.record, name)
        call.shapes[name], call.dtypes[name] = value.shape, DTYPE_CODES[value.dtype]
        set_tensor(record, value.shape[1:], call.dtypes[name])
        record.data = value.weight.address if value.is_coded else value.weight.panels.data_ptr()
        record.rows, record.layout = value.shape[0], Layout.CODES if value.is_coded else Layout.PANELS
        call.kept.append(value)
        return
    if not isinstance(value, torch.Tensor) or not value.is_contiguous() or value.dtype not in DTYPE_CODES:
        raise _wrong(call.op, name, "a contiguous tensor", value)
    dtype = DTYPE_CODES[value.dtype]
    if declared.dtype is not None and dtype != call.dtype(declared.dtype):
        raise _wrong(call.op, name, f"of {call.dtype(declared.dtype).name}", value)
    record = getattr(call.record, name)
    call.shapes[name], call.dtypes[name] = tuple(value.shape), dtype
    set_tensor(record, tuple(value.shape[-1:]), dtype)
    record.data, record.rows = value.data_ptr(), value.shape[0] if value.dim() > 1 else 1
    call.kept.append(value)


def _set_weight(
    call: Call, name: str, of: str, directly: bool, value: object, wanted: type[PackedWeight] | type[PackedExperts]
) -> None:
    if not isinstance(value, wanted):
        raise _wrong(call.op, name, f"a {wanted.__name__}", value)
    width = call.shapes[of][-1]
    if (directly and value.in_features != width) or value.dtype not in (None, TORCH_DTYPES[call.dtypes[of]]):
        raise ValueError(
            f"{call.op.name}: {name} multiplies rows of {value.in_features} elements of {value.dtype}, "
            f"but {of} has {width} of {call.dtypes[of].name}"
        )
    shape = (value.out_features, value.in_features)
    call.shapes[name] = (value.num_experts, *shape) if isinstance(value, PackedExperts) else shape
    setattr(call.record, name, value.address)
    call.kept.append(value)


def _set_low_rank(call: Call, name: str, value: object) -> None:
    if not isinstance(value, PackedLowRank):
        raise _wrong(call.op, name, "a PackedLowRank", value)
    x = call.dtypes.get("x")
    if x is not None and TORCH_DTYPES[x] != value.dtype:
        raise ValueError(f"{call.op.name}: adapters of {value.dtype} do not fit x of {x.name}")
    call.shapes[name] = value.shape
    setattr(call.record, name, value.address)
    call.kept.append(value)


def _set_cache(call: Call, name: str, value: object) -> None:
    if not isinstance(value, AnyKVLayer):
        raise _wrong(call.op, name, "a KVLayer", value)
    cache: KVLayer = value  # of torch tensors: nothing else reaches these kernels
    num_blocks, kv_heads, block_size, head_dim = cache.k.shape
    value_dim = cache.v.shape[3]
    record = getattr(call.record, name)
    for pages in (cache.k, cache.v):
        check_page_shape(pages.shape[3], block_size)
        if pages.shape[:3] != cache.k.shape[:3] or not pages[0].is_contiguous():
            raise ValueError(f"{call.op.name}: k and v of a cache must have as many slots and blocks without gaps")
    record.k, record.v = cache.k.data_ptr(), cache.v.data_ptr()
    record.k_stride, record.v_stride = cache.k.stride(0), cache.v.stride(0)
    dtype = DTYPE_CODES[cache.k.dtype]
    if dtype is DType.I8:
        if cache.k_scale is None or cache.v_scale is None:
            raise ValueError(f"{call.op.name}: an int8 cache needs scales")
        record.k_scale, record.v_scale = cache.k_scale.data_ptr(), cache.v_scale.data_ptr()
        record.scale_stride = cache.k_scale.stride(0)
    for heads, shape in call.shapes.items():
        if heads in call.dtypes and len(shape) == 3 and dtype is not DType.I8 and call.dtypes[heads] != dtype:
            raise ValueError(f"{call.op.name}: {heads} is {call.dtypes[heads].name}, its cache {dtype.name}")
    record.num_blocks, record.kv_heads, record.block_size = num_blocks, kv_heads, block_size
    record.head_dim, record.value_dim, record.dtype = head_dim, value_dim, dtype
    call.shapes[name] = (num_blocks, kv_heads, block_size, head_dim, value_dim)
    call.kept.append(cache)


def _set_states(call: Call, name: str, value: object) -> None:
    if not isinstance(value, AnyKVLayer):
        raise _wrong(call.op, name, "a KVLayer", value)
    states: KVLayer = value
    k, v = states.k, states.v
    rows = next(argument for argument, declared in call.op.arguments.items() if isinstance(declared, Rows))
    if DTYPE_CODES[k.dtype] != call.dtypes[rows] or (v.numel() and v.dtype != torch.float32):
        raise ValueError(
            f"{call.op.name}: k of states must be {call.dtypes[rows].name} as {rows} is, and v float32, not {k.dtype} "
            f"and {v.dtype}"
        )
    if v.shape[0] != k.shape[0] or not (k[0].is_contiguous() and v[0].is_contiguous()):
        raise ValueError(f"{call.op.name}: k and v of states must have as many blocks, each without gaps")
    record = getattr(call.record, name)
    record.k, record.v = k.data_ptr(), v.data_ptr()
    record.k_stride, record.v_stride = k.stride(0), v.stride(0)
    record.num_blocks, record.head_dim, record.dtype = k.shape[0], k.shape[3], DTYPE_CODES[k.dtype]
    record.kv_heads, record.block_size, record.value_dim = v.shape[1:]
    call.shapes[name] = (*k.shape, *v.shape[1:])
    call.kept.append(states)


def _wrong(op: Op, name: str, wanted: str, value: object) -> ValueError:
    return ValueError(f"{op.name}: {name} must be {wanted}, not {_describe(value)}")


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}, strides {value.stride()}"
    return f"{type(value).__name__}"
