"""The interface of Python and the C++ kernels: structs, constants and functions, each declared once, here or as an op.

When the kernels are compiled, their header is generated from these declarations (`header.py`), and
ctypes uses the same declarations, so the two sides cannot disagree.
"""

from collections.abc import Mapping
from ctypes import Structure, c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pagoda.kernels.linear.forms import Offset
from pagoda.ops.declare import (
    Activation,
    Argument,
    Cache,
    Domain,
    DType,
    Experts,
    Group,
    LowRank,
    Op,
    Packed,
    Ranks,
    Rows,
    Scalar,
    Table,
)
from pagoda.ops.forward import OP_TABLE

NO_CACHE = -1
"""In place of a number of blocks: the op reads no cache, and all tokens of a row must be in the batch."""


class CheckResult(IntEnum):
    """The result of a check: the return value of the checking functions."""

    NOTHING = 0
    INDEX = 1
    QUERY_START = 2
    SEQ_LEN = 3
    BLOCK_ID = 4
    SLOT = 5
    LAST_SEEN = 6


class RankFailure(IntEnum):
    """Why ranks cannot compute together any more."""

    NOTHING = 0
    ABORTED = 1
    PEER_GONE = 2
    DEADLINE = 3
    DISAGREE = 4


class Layout(IntEnum):
    """The memory layout of a Tensor's rows."""

    ROWS = 0
    PANELS = 1  # as a packed weight of floats: see linear/packed.h
    CODES = 2  # `data` is a PackedLinear of codes


ENUMS: dict[str, type[IntEnum]] = {
    "": DType,
    "DOMAIN_": Domain,
    "ACTIVATION_": Activation,
    "OFFSET_": Offset,
    "BAD_": CheckResult,
    "RANKS_": RankFailure,
    "LAYOUT_": Layout,
}
"""Enums of the header, by the prefix of their names there."""

_SCALARS = {
    "void": None,
    "bool": c_bool,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "float": c_float,
    "double": c_double,
    "const char*": c_char_p,
}


class Shared(Structure):
    """A struct shared with C++. fields: name -> C type. It has no other attributes: a misspelled field is an error."""

    __slots__ = ()
    fields: Mapping[str, str] = {}


STRUCTS: dict[str, type[Shared]] = {}
"""Every struct of the header by name, in order."""


def ctype(c_type: str) -> Any:
    """The ctypes type of a C type: a scalar, a pointer, or one of STRUCTS."""
    if c_type in _SCALARS:
        return _SCALARS[c_type]
    return c_void_p if c_type.endswith("*") else STRUCTS[c_type]


def struct(name: str, doc: str, /, **fields: str) -> type[Shared]:
    """Declare a struct and return its ctypes type. fields: C types."""
    layout = [(field, ctype(c_type)) for field, c_type in fields.items()]
    made = type(name, (Shared,), {"__doc__": doc, "__slots__": (), "fields": fields, "_fields_": layout})
    STRUCTS[name] = made
    return made


Tensor = struct(
    "Tensor",
    "Rows of `heads` vectors of `dim` elements, without gaps within a row; the next row is `stride` elements on. "
    "layout: LAYOUT_ROWS, except for a table declared to be taken in panels too; its stride then means nothing.",
    data="void*", rows="int64_t", stride="int64_t", heads="int64_t", dim="int64_t", dtype="int32_t", layout="int32_t",
)  # fmt: skip
KVPages = struct(
    "KVPages",
    "One layer's cache (KVLayer). num_blocks: the null block included. Strides: elements from block to block, which "
    "are more than a block has where layers of other shapes share the memory. Scales are null unless dtype is I8. "
    "head_dim: of K, and of V too unless value_dim is another. Of states, head_dim is that of k; v is float, with "
    "kv_heads matrices [block_size, value_dim] per block.",
    k="void*", v="void*", k_scale="float*", v_scale="float*", k_stride="int64_t", v_stride="int64_t",
    scale_stride="int64_t", num_blocks="int64_t", kv_heads="int64_t",
    block_size="int64_t", head_dim="int64_t", value_dim="int64_t", dtype="int32_t", unused="int32_t",
)  # fmt: skip
RowGroup = struct(
    "RowGroup",
    "The batch, or its output rows, as one KV group sees them (AttentionMetadata). last_seen: null where all are a "
    "token's own.",
    query_start="const int32_t*", seq_lens="const int32_t*", block_table="const int32_t*",
    slot_mapping="const int64_t*", last_seen="const int32_t*", table_stride="int64_t", table_width="int64_t",
    block_size="int64_t", num_rows="int64_t", num_slots="int64_t",
)  # fmt: skip
PackedLinear = struct(
    "PackedLinear",
    "A packed weight. bias: [out padded to a panel] or null. group: elements along `in` that share a scale, or 0. "
    "next: the weight of the outputs that follow, in another form, or null. input_order: of codes, which element of x "
    "each of the in_features is multiplied with, or -1 for none; null where it is their own. in_pairs: the first half "
    "of the outputs are gates of the second, each whole panels.",
    panels="const void*", bias="const float*", out_features="int64_t", in_features="int64_t", kind="int32_t",
    group="int32_t", next="const PackedLinear*", input_order="const int32_t*", in_pairs="int32_t", unused="int32_t",
)  # fmt: skip
BlockRows = struct(
    "BlockRows",
    "Rows of blocks in a file, `row_bytes` apart. type: a Block.   head_order: in which the `unit` rows of a head are "
    "taken, or null.   exponents: of BLOCK_MXFP4_PAIRS, of rows `exponents_row` apart, else null.",
    data="const void*", row_bytes="int64_t", rows="int64_t", head_order="const int64_t*", type="int32_t",
    unit="int32_t", exponents="const uint8_t*", exponents_row="int64_t",
)  # fmt: skip
CodeMatrix = struct(
    "CodeMatrix",
    "Codes in words of 4 bytes in a file; the next words along the outputs and the inputs are out_bytes and in_bytes "
    "on. A word has out_codes along the outputs, in AWQ's order if `is_interleaved`, and in_codes along the inputs. "
    "is_signed: a word is bytes of code - 128, of which the last of a row may be fewer.",
    data="const void*", out_bytes="int64_t", in_bytes="int64_t", out_codes="int32_t", in_codes="int32_t",
    is_signed="int32_t", is_interleaved="int32_t",
)  # fmt: skip
CodeRows = struct(
    "CodeRows",
    "Rows of codes in a file, from the row `first` of the matrices on. scales: float16.   zeros: data is null where "
    "there are none; `zero` is added to what is stored.   groups: the column in scales and zeros of each 32 elements "
    "along `in`.   head_order, unit: as of BlockRows.",
    codes="CodeMatrix", scales="CodeMatrix", zeros="CodeMatrix", groups="const int32_t*", head_order="const int64_t*",
    rows="int64_t", first="int64_t", unit="int32_t", zero="int32_t",
)  # fmt: skip
ExpertStack = struct(
    "ExpertStack", "Packed weights of equal shape, one per expert.",
    experts="const PackedLinear* const*", count="int64_t",
)  # fmt: skip
LowRankPiece = struct(
    "LowRankPiece",
    "What an adapter adds to outputs first_row .. of a layer: b times elements first_rank .. of the product with a.",
    b="const PackedLinear*", first_rank="int64_t", first_row="int64_t",
)  # fmt: skip
LowRankSlot = struct(
    "LowRankSlot",
    "One adapter's weights for a layer. a: of all pieces, one after the other; null where the adapter has none.",
    a="const PackedLinear*", pieces="const LowRankPiece*", count="int64_t",
)  # fmt: skip
LowRankSlots = struct(
    "LowRankSlots", "The adapters' weights for one layer, by slot; slot 0 is empty. dtype: of the weights.",
    slots="const LowRankSlot*", count="int64_t", dtype="int32_t", unused="int32_t",
)  # fmt: skip
RankSegment = struct(
    "RankSegment",
    "The beginning of the memory that ranks share: how many there are, and the sizes of its parts. "
    "half_bytes: of a chunk of a sum or gather.   slot_bytes: of a chunk of a message.   spin_ns: how long to look "
    "for others before sleeping.",
    num_ranks="int64_t", half_bytes="int64_t", slot_bytes="int64_t", num_slots="int64_t", spin_ns="int64_t",
)  # fmt: skip
RankState = struct(
    "RankState",
    "A rank and its stage in that memory. number: this rank's, of all.   first, size: the ranks of its stage.   "
    "chunks, meetings, sent, received: how many so far.   failed, peer: a RankFailure, and the rank it is about.   "
    "previous, next: sockets to this rank of the stages before and after, where those are on other machines.",
    segment="void*", number="int32_t", first="int32_t", size="int32_t", failed="int32_t", peer="int32_t",
    unused="int32_t", deadline_ns="int64_t", chunks="int64_t", meetings="int64_t", sent="int64_t", received="int64_t",
    previous="int32_t", next="int32_t",
)  # fmt: skip
Binding = struct(
    "Binding",
    "Where a step finds a Tensor in this run: the field at `field` of its arguments gets places[place] + bytes, and as "
    "many rows as `domain` has.",
    place="int32_t", domain="int32_t", field="int64_t", bytes="int64_t",
)  # fmt: skip
Step = struct(
    "Step",
    "One op of a program, with its argument struct.",
    op="int32_t", num_bindings="int32_t", args="void*", bindings="const Binding*",
)  # fmt: skip
Check = struct(
    "Check",
    "What is checked before a program runs. group null: `domain`'s indices at `place`, `width` in a row, each below "
    "`limit`, or where that is negative below the rows of domain -1 - limit. Else a group against a cache of `limit` "
    "blocks (or NO_CACHE): `domain`'s rows are its queries, and its slots are for those of `written`; -1 for none.",
    group="const RowGroup*", limit="int64_t", place="int32_t", domain="int32_t", dtype="int32_t", width="int32_t",
    written="int32_t", unused="int32_t",
)  # fmt: skip
Program = struct(
    "Program",
    "Steps with their memory laid out. slot_bytes: [num_slots][NUM_DOMAINS], per row. Places are the slots, then the "
    "inputs and results.",
    steps="const Step*", checks="const Check*", slot_bytes="const int64_t*", num_steps="int64_t", num_checks="int64_t",
    num_slots="int64_t",
)  # fmt: skip
Run = struct(
    "Run",
    "One batch for a program. rows: [NUM_DOMAINS]. places: slots are filled in from `scratch`, aligned to 64. "
    "bad_check, bad_at: where a check failed.",
    rows="const int64_t*", places="void**", scratch="void*", bad_check="int64_t", bad_at="int64_t",
)  # fmt: skip

TokenRuns = struct(
    "TokenRuns",
    "TokenLists: list i is ids[starts[i]] .. ids[starts[i + 1] - 1].",
    starts="const int64_t*", ids="const int32_t*",
)  # fmt: skip
LogitConstraints = struct(
    "LogitConstraints",
    "BatchConstraints. Arrays have an element per row, but bias_values and output_counts one per id of their list, and "
    "`allowed` points to a byte per token, the first allowed_lengths of the vocabulary, or is null.",
    rows="const int64_t*", count="int64_t", bias="TokenRuns", bias_values="const float*", penalized="TokenRuns",
    output_counts="const int32_t*", repetition="const float*", frequency="const float*", presence="const float*",
    allowed="const uint8_t* const*", allowed_lengths="const int64_t*", forbidden="TokenRuns",
)  # fmt: skip

_SCALAR_TYPES = {Scalar.F32: "float", Scalar.I32: "int32_t", Scalar.FLAG: "int32_t"}


def _field_type(argument: Argument) -> str:
    match argument:
        case Rows() | Table():
            return "Tensor"
        case Packed():
            return "const PackedLinear*"
        case Experts():
            return "const ExpertStack*"
        case LowRank():
            return "const LowRankSlots*"
        case Cache():
            return "KVPages"
        case Group():
            return "const RowGroup*"
        case Ranks():
            return "RankState*"
        case Scalar():
            return _SCALAR_TYPES[argument]


def _args_struct(op: Op) -> type[Shared]:
    fields = {name: _field_type(argument) for name, argument in op.arguments.items()}
    fields |= dict.fromkeys(op.outputs, "Tensor")
    return struct(op.struct_name, f"Arguments of {op.name}, then its results.", **fields)


KERNEL_OPS = [op for op in OP_TABLE.values() if op.slices is None]
"""The ops that have a kernel; an op's index is its code in a recorded program."""

ARGS = {op.name: _args_struct(op) for op in KERNEL_OPS}
"""Argument structs by op."""


@dataclass(frozen=True, slots=True)
class Function:
    """A C function: what it returns, and its parameters in order, as C types."""

    returns: str
    parameters: Mapping[str, str]


def _function(returns: str, /, **parameters: str) -> Function:
    return Function(returns, parameters)


_LOGITS = {"logits": "const float*", "stride": "int64_t", "rows": "int64_t", "vocab": "int64_t"}

FUNCTIONS: dict[str, Function] = {
    # The build, and the thread pool.
    "pagoda_isa": _function("const char*"),
    "pagoda_compiler": _function("const char*"),
    "pagoda_shares_done": _function("uint64_t", threads="int32_t"),
    "pagoda_pin_thread": _function("bool", thread="int32_t", cpus="const int32_t*", count="int32_t"),
    "pagoda_pool_counts": _function("void", counts="int64_t*"),
    "pagoda_empty_region_ns": _function("double", threads="int32_t", repeats="int32_t"),
    "pagoda_unfinished_regions": _function("int64_t", threads="int32_t", repeats="int64_t", delay="int32_t"),
    # Preparing weights.
    "pagoda_linear_plan": _function("void", weight="const PackedLinear*", threads="int32_t", plan="int64_t*"),
    "pagoda_linear_bytes": _function("int64_t", weight="const PackedLinear*"),
    "pagoda_pack_words": _function(
        "void", weight="const PackedLinear*", source="const void*", first_row="int64_t", rows="int64_t",
        threads="int32_t",
    ),
    "pagoda_pack_codes": _function(
        "void", weight="const PackedLinear*", codes="const uint8_t*", scales="const uint8_t*",
        offsets="const uint8_t*", threads="int32_t",
    ),
    "pagoda_pack_blocks": _function(
        "void", weight="const PackedLinear*", pieces="const BlockRows*", threads="int32_t"
    ),
    "pagoda_pack_code_rows": _function(
        "void", weight="const PackedLinear*", pieces="const CodeRows*", threads="int32_t"
    ),
    # Counts for tests.
    "pagoda_attention_positions": _function("int64_t", rows="const RowGroup*", group="int32_t"),
    # Sampling.
    "pagoda_constrain": _function(
        "void", **(_LOGITS | {"logits": "float*"}), constraints="const LogitConstraints*", threads="int32_t"
    ),
    "pagoda_best_tokens": _function("void", **_LOGITS, values="float*", ids="int64_t*", threads="int32_t"),
    "pagoda_sample": _function(
        "void", **_LOGITS, best_values="const float*", best_ids="const int64_t*", temperature="const float*",
        top_k="const int32_t*", top_p="const float*", min_p="const float*", uniform="const double*",
        tokens="int64_t*", threads="int32_t",
    ),
    "pagoda_process_logits": _function(
        "void", **{**_LOGITS, "logits": "float*"}, best_values="const float*", temperature="const float*",
        top_k="const int32_t*", top_p="const float*", min_p="const float*", threads="int32_t",
    ),
    "pagoda_mask_logits": _function(
        "void", **{**_LOGITS, "logits": "float*"}, draws="const int64_t*", count="int64_t", bits="const uint32_t*",
        threads="int32_t",
    ),
    "pagoda_top_logprobs": _function(
        "void", **_LOGITS, chosen="const int64_t*", k="int64_t", ids="int32_t*", logprobs="float*", ranks="int32_t*",
        threads="int32_t",
    ),
    # Ranks in shared memory.
    "pagoda_rank_segment_bytes": _function("int64_t", sizes="const RankSegment*"),
    "pagoda_join_ranks": _function("void", state="RankState*"),
    "pagoda_send": _function("void", state="RankState*", data="const void*", bytes="int64_t"),
    "pagoda_receive": _function("void", state="RankState*", data="void*", bytes="int64_t"),
    # Checks of indices and block tables, and recorded programs.
    "pagoda_check_indices": _function(
        "int32_t", indices="const void*", dtype="int32_t", count="int64_t", limit="int64_t", bad_at="int64_t*"
    ),
    "pagoda_check_group": _function(
        "int32_t", group="const RowGroup*", num_blocks="int64_t", num_queries="int64_t", num_written="int64_t",
        bad_at="int64_t*",
    ),
    "pagoda_replay_scratch_bytes": _function("int64_t", program="const Program*", rows="const int64_t*"),
    "pagoda_replay": _function(
        "int32_t", program="const Program*", run="Run*", threads="int32_t", nanoseconds="int64_t*"
    ),
    **{
        f"pagoda_{op.name}": _function("void", args=f"const {op.struct_name}*", threads="int32_t") for op in KERNEL_OPS
    },
}  # fmt: skip
"""Every function that the library exports."""
