"""Declare an op: its arguments, what it reads and writes, and its results.

`op(...)` decorates a method of `ForwardOps` with what Python's types cannot say. From the declaration follow the op's
argument struct, its C prototype, the binding, how it is recorded and replayed, and the checks of its arguments.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias, TypeVar

from pagoda.ops.tensor import LinearWeight, LowRankTable, RankGroup

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


class DType(IntEnum):
    """Element types, by the codes the kernels know them by."""

    F32 = 0
    BF16 = 1
    F16 = 2
    I8 = 3
    I32 = 4
    I64 = 5

    @property
    def is_float(self) -> bool:
        return self <= DType.F16


class Domain(IntEnum):
    """What the rows of a value are: how many there are differs from batch to batch."""

    TOKENS = 0  # the batch's tokens
    OUTPUTS = 1  # the tokens whose final hidden states are needed
    EMBEDS = 2  # the batch's tokens that are given as embeddings
    LOGITS = 3  # those of them that give logits
    FEATURES = 4  # of an encoder: what it reads, where that has not a row per token
    ENCODER = 5  # of a decoder: the encoder's outputs of the rows whose encoder input enters the cache in this step


class Activation(IntEnum):
    """The activation function of a layer."""

    IDENTITY = 0  # none
    SILU = 1  # x / (1 + exp(-x))
    GELU = 2  # x * (1 + erf(x / sqrt(2))) / 2
    GELU_TANH = 3  # x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
    RELU = 4  # max(x, 0)
    RELU_SQUARED = 5
    SIGMOID = 6  # 1 / (1 + exp(-x))
    TANH = 7


class Scalar(Enum):
    """A number that is fixed when a forward is recorded."""

    F32 = "float"
    I32 = "int"
    FLAG = "bool"


class Slots(Enum):
    """Which rows a Group argument describes: see `Group`."""

    QUERIES = "queries"
    WRITTEN = "written"


@dataclass(frozen=True, slots=True)
class Rows:
    """An activation or an input of the batch: [rows], [rows, dim] or [rows, heads, dim].

    dtype: the required dtype, or the name of an argument with the same dtype; None is any float.
    like: an argument of the same shape.
    below: an argument whose rows it indexes, or the weights of experts, one by one; the indices are checked.
    contiguous: rows must be adjacent (elements within a row always are).
    any_domain: its rows may be of another domain than those of the other arguments.
    writes: the op changes it in place, so it must be what an earlier op made.
    """

    dtype: DType | str | None = None
    like: str | None = None
    below: str | None = None
    contiguous: bool = False
    any_domain: bool = False
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A contiguous tensor that belongs to the model.

    dtype: as in Rows.   packed: it may also be the rows of a packed linear weight (PrepareOps.table_of).
    optional: it may be None; its shape is then ().
    """

    dtype: DType | str | None = None
    packed: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Packed:
    """A LinearWeight that multiplies the argument `of`."""

    of: str


@dataclass(frozen=True, slots=True)
class Experts:
    """ExpertWeights that multiply the argument `of`, or what the op makes of it on the way."""

    of: str
    directly: bool = True


@dataclass(frozen=True, slots=True)
class LowRank:
    """A LowRankTable: the adapters' weights for one layer, by slot."""


@dataclass(frozen=True, slots=True)
class Cache:
    """A KVLayer, which the op reads, or also writes. Its shape is [num_blocks, K, block_size, D of K, D of V].

    states: its blocks hold states rather than pages: plain rows of the dtype of the op's rows in `k`, and matrices of
    float32 in `v`, [num_blocks, H, K, V] or without elements. Its shape is then that of k, followed by [H, K, V].
    """

    writes: bool
    states: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """AttentionMetadata. QUERIES: the op's rows are the queries it describes.   WRITTEN: they are its slot_mapping's:
    the batch's tokens, or for cross attention the encoder's.

    cache: the argument that its blocks and slots belong to; they are checked against it. None for an op that reads no
    cache: all tokens of a row must then be in the batch.
    """

    rows: Slots
    cache: str | None = None


@dataclass(frozen=True, slots=True)
class Ranks:
    """A RankGroup: the ranks that compute the op together. Every one of them must call it, in the same order."""


Argument: TypeAlias = Rows | Table | Packed | Experts | LowRank | Cache | Group | Ranks | Scalar

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes by argument: a LinearWeight's is (out, in), that of ExpertWeights (experts, out, in), that of a LowRankTable
(slots, out, in), that of an integer n (n,)."""


@dataclass(frozen=True, slots=True)
class Out:
    """A result, contiguous, with a row for each row of the argument `rows` and in its domain.

    row_shape: (dim,) or (heads, dim).   dtype: as in Rows; None is that of `rows`.
    below: an argument whose last dimension it indexes: a forward may give it to an op that wants such indices.
    """

    rows: str
    row_shape: Callable[[Shapes], tuple[int, ...]]
    dtype: DType | str | None = None
    below: str | None = None


def like(name: str) -> Out:
    """A result of the shape and dtype of an argument."""
    return Out(name, lambda shapes: shapes[name][1:])


@dataclass(frozen=True, slots=True)
class Slice:
    """A view of an argument [T, width]: `heads` vectors of `dim` elements, from element `offset` of each row on."""

    offset: int
    heads: int
    dim: int


Check: TypeAlias = Callable[[Shapes], None]


@dataclass(frozen=True, slots=True)
class Op:
    """One entry of the op table.

    folder: where its kernels are, in pagoda/kernels.   arguments, outputs: by name, in order.
    signature: the Python signature, without self.
    check: receives the shapes, and raises ValueError if they do not fit together.
    slices: for an op without a kernel: returns its results, views of its first argument, from the other arguments.
    """

    name: str
    folder: str
    arguments: Mapping[str, Argument]
    outputs: Mapping[str, Out]
    signature: inspect.Signature
    check: Check | None = None
    slices: Callable[..., Sequence[Slice]] | None = None

    @property
    def struct_name(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("_")) + "Args"

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Arguments by name, defaults filled in. Raises TypeError for a call that does not fit the signature."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments


def op(folder: str, check: Check | None = None, /, **declared: Argument | Out) -> Callable[[FunctionT], FunctionT]:
    """Declare the decorated method an op: its arguments, named as its parameters are, then its outputs.

    An argument whose type says enough is left out: see `_BY_TYPE`.
    """

    def declare(function: FunctionT) -> FunctionT:
        arguments = {name: what for name, what in declared.items() if not isinstance(what, Out)}
        outputs = {name: what for name, what in declared.items() if isinstance(what, Out)}
        return _attach(function, folder, arguments, outputs, check)

    return declare


def view(
    folder: str, slices: Callable[..., Sequence[Slice]], /, **arguments: Argument
) -> Callable[[FunctionT], FunctionT]:
    """Declare the decorated method an op that only views its first argument; see Op.slices."""
    return lambda function: _attach(function, folder, arguments, {}, slices=slices)


_BY_TYPE: Mapping[object, Argument] = {
    float: Scalar.F32,
    int: Scalar.I32,
    Activation: Scalar.I32,
    bool: Scalar.FLAG,
    LinearWeight: Packed("x"),
    LowRankTable: LowRank(),
    RankGroup: Ranks(),
}
"""What arguments of these types are, unless it is declared."""


def _attach(
    function: FunctionT,
    folder: str,
    declared: dict[str, Argument],
    outputs: dict[str, Out],
    check: Check | None = None,
    slices: Callable[..., Sequence[Slice]] | None = None,
) -> FunctionT:
    name = function.__name__
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    by_type = {of.name: _BY_TYPE[of.annotation] for of in parameters if of.annotation in _BY_TYPE}
    arguments = {of.name: what for of in parameters if (what := (by_type | declared).get(of.name)) is not None}
    given = [of.name for of in parameters]
    if given != list(arguments) or not declared.keys() <= arguments.keys():
        raise TypeError(f"op {name}: it declares the arguments {[*by_type, *declared]}, its signature has {given}")
    for argument in arguments.values():
        _check_names(name, argument, arguments)
    for out in outputs.values():
        if out.rows not in arguments:
            raise TypeError(f"op {name}: an output has the rows of {out.rows!r}, which is not an argument")
    entry = Op(name, folder, arguments, outputs, signature.replace(parameters=parameters), check, slices)
    function.__op__ = entry  # type: ignore[attr-defined]
    return function


def _check_names(name: str, argument: Argument, arguments: Mapping[str, Argument]) -> None:
    """Raises TypeError where an argument's declaration names one that does not exist."""
    for field in ("dtype", "like", "below", "of", "cache"):
        named = getattr(argument, field, None)
        if isinstance(named, str) and named not in arguments:
            raise TypeError(f"op {name}: {field}={named!r} is not an argument; there are {', '.join(arguments)}")


def declared_ops(*owners: type) -> dict[str, Op]:
    """Return the op table: the ops that the methods of `owners` declare, by name, in order.

    Raises TypeError for a method that declares none.
    """
    table: dict[str, Op] = {}
    for owner in owners:
        for name, method in vars(owner).items():
            if name.startswith("_") or not callable(method):
                continue
            entry = getattr(method, "__op__", None)
            if not isinstance(entry, Op):
                raise TypeError(f"{owner.__name__}.{name} is not declared an op")
            table[name] = entry
    return table
