"""Shapes in the op table: checks of arguments against each other, and the shapes of results that no argument has."""

from collections.abc import Sequence
from math import prod

from pagoda.ops.declare import Shapes, Slice


def selected_shape(shapes: Shapes) -> tuple[int, ...]:
    """A row, or as many as each row of the index names."""
    index, row = shapes["index"], shapes["x"][1:]
    return row if len(index) == 1 else (prod(index[1:]) * prod(row),)


def check_cache_heads(shapes: Shapes) -> None:
    """Queries must have a multiple of the cache's heads, of the size of K and of V."""
    _, kv_heads, _, key_dim, value_dim = shapes["cache"]
    q = shapes["q"]
    if q[1] % kv_heads or not q[2] == key_dim == value_dim:
        raise ValueError(
            f"q {q} does not fit a cache of {kv_heads} heads, K of {key_dim} and V of {value_dim} elements"
        )


def check_latent(shapes: Shapes) -> None:
    """Both parts of the queries must have as many heads, the cache one, whose V is the larger part of its key."""
    q, rotated, (_, kv_heads, _, key_dim, value_dim) = shapes["q"], shapes["q_rotated"], shapes["cache"]
    if kv_heads != 1 or q[1] != rotated[1] or (q[2], rotated[2]) != (value_dim, key_dim) or key_dim > value_dim:
        raise ValueError(
            f"q {q} and {rotated} do not fit a cache of {kv_heads} heads, K of {key_dim} and V of {value_dim} elements"
        )


def check_written(shapes: Shapes) -> None:
    """K and V must be as those of the cache."""
    k, v, (_, kv_heads, _, key_dim, value_dim) = shapes["k"], shapes["v"], shapes["cache"]
    if k[1:] != (kv_heads, key_dim) or v[1:] != (kv_heads, value_dim):
        raise ValueError(
            f"k {k} and v {v} do not fit a cache of {kv_heads} heads, K of {key_dim} and V of {value_dim} elements"
        )


PANEL_ROWS = 32
"""Rows of a head's matrix are a multiple of this: the native kernels multiply so many at once."""


def check_by_head(shapes: Shapes) -> None:
    """A weight must have as many rows for each head, and whole panels."""
    x, weight = shapes["x"], shapes["weight"]
    if len(x) != 3 or weight[0] % x[1]:
        raise ValueError(f"a weight {weight} has not as many rows for each head of x {x}")
    if x[1] > 1 and weight[0] // x[1] % PANEL_ROWS:
        raise ValueError(f"a weight {weight} has {weight[0] // x[1]} rows per head; must be a multiple of {PANEL_ROWS}")


def check_factors(shapes: Shapes) -> None:
    if shapes["factors"][1:] != (1,):
        raise ValueError(f"factors {shapes['factors']} are not one per row")


def check_product(shapes: Shapes) -> None:
    if prod(shapes["x"][1:]) != prod(shapes["y"][1:]):
        raise ValueError(f"rows of x {shapes['x']} and y {shapes['y']} have not as many elements")


def check_gate_up(shapes: Shapes) -> None:
    if shapes["gate_up"][1] % 2:
        raise ValueError(f"gate_up of {shapes['gate_up'][1]} columns has no halves")


def check_text(shapes: Shapes) -> None:
    """Queries, K and V must have heads of one size, and queries a multiple of the others' heads."""
    q, k = shapes["q"], shapes["k"]
    if q[1] % k[1] or q[2] != k[2]:
        raise ValueError(f"heads of q {q} do not fit those of k {k}")
    _check_bias(shapes)


def check_paged(shapes: Shapes) -> None:
    """There must be a sink for each head, if there are any; see `_check_bias`."""
    check_cache_heads(shapes)
    _check_bias(shapes)
    sinks, (first,), heads = shapes["sinks"], shapes["first"], shapes["q"][1]
    if sinks and (first < 0 or sinks[0] < first + heads):
        raise ValueError(f"{sinks[0]} sinks are not those of {heads} heads from {first} on")


def _check_bias(shapes: Shapes) -> None:
    """A bias must have a row for each head, with one distance in its middle."""
    bias, (first,), heads = shapes["bias"], shapes["first"], shapes["q"][1]
    if bias and (len(bias) != 2 or not bias[1] % 2 or not 0 <= first <= bias[0] - heads):
        raise ValueError(f"a bias {bias} is not that of {heads} heads from {first} on, by distance")


def check_tables(shapes: Shapes) -> None:
    """cos and sin must have half a head per position; several positions of a row must divide it."""
    if shapes["cos"] != shapes["sin"] or 2 * shapes["cos"][1] != shapes["q"][2] or shapes["k"][2] != shapes["q"][2]:
        raise ValueError(f"cos {shapes['cos']} and sin {shapes['sin']} do not fit q {shapes['q']} and k {shapes['k']}")
    runs = shapes["positions"][1:]
    if len(runs) > 1 or any(not run or shapes["cos"][1] % run for run in runs):
        raise ValueError(f"positions {shapes['positions']} do not divide the {shapes['cos'][1]} pairs of a head")


def check_rotary_write(shapes: Shapes) -> None:
    check_tables(shapes)
    check_written(shapes)


def check_short_conv(shapes: Shapes) -> None:
    """Weight and bias must be of x's channels, and a state of as many rows as the weight has before its last."""
    x, weight, bias, (_, rows, per_block, dim, *_) = (shapes[name] for name in ("x", "weight", "bias", "states"))
    if len(weight) != 2 or prod(x[1:]) != weight[1] or (bias and bias != weight[1:]):
        raise ValueError(f"weight {weight} and bias {bias} do not fit x {x}")
    if (rows, per_block, dim) != (weight[0] - 1, 1, weight[1]):
        raise ValueError(f"states of {rows} rows of {dim} elements do not fit a weight {weight}")


def state_outputs(shapes: Shapes) -> tuple[int, ...]:
    """Values of all heads."""
    num_heads, _, value_dim = shapes["states"][-3:]
    return (num_heads * value_dim,)


def check_mamba2(shapes: Shapes) -> None:
    _check_scan(shapes, ("dt",), ("rate", "dt_bias", "d"))


def check_gated_delta(shapes: Shapes) -> None:
    _check_scan(shapes, ("a", "b"), ("rate", "dt_bias"))


def _check_scan(shapes: Shapes, per_token: Sequence[str], per_head: Sequence[str]) -> None:
    """Of a state [H, K, V], x must have H values [V] and two vectors [K] per group; others a number per head."""
    num_heads, key_dim, value_dim = state = shapes["states"][-3:]
    keys, x = prod(shapes["x"][1:]) - num_heads * value_dim, shapes["x"]
    groups = keys // (2 * key_dim) if key_dim else 0
    if groups < 1 or keys != 2 * groups * key_dim or num_heads % groups:
        raise ValueError(f"x {x} does not have the keys, queries and values of states {state}")
    numbers = {name: prod(shapes[name][1:]) for name in per_token} | {name: prod(shapes[name]) for name in per_head}
    for name, count in numbers.items():
        if count != num_heads:
            raise ValueError(f"{name} {shapes[name]} does not have a number for each of the {num_heads} heads")


def check_route(shapes: Shapes) -> None:
    """There must be top_k experts in the groups that a token may take, and numbers of each expert for all of them."""
    experts, bias, factors = shapes["router_logits"][1], shapes["bias"], shapes["factors"]
    groups, top_groups, best, top_k = (shapes[name][0] for name in ("groups", "top_groups", "best", "top_k"))
    size = experts // groups if groups > 0 else 0
    if not size or experts % groups or not 1 <= top_groups <= groups or not 1 <= best <= size:
        raise ValueError(f"{top_groups} of {groups} groups, by {best} experts each, do not fit {experts} experts")
    if groups > 1 and not bias:
        raise ValueError(f"a choice among {groups} groups needs a bias of the {experts} experts, which may be zeros")
    if not 1 <= top_k <= top_groups * size:
        raise ValueError(f"top_k must be 1 to {top_groups * size}, not {top_k}")
    for name, shape in (("bias", bias), ("factors", factors)):
        if shape not in ((), (experts,)):
            raise ValueError(f"{name} {shape} is not one for each of {experts} experts")


def check_moe(shapes: Shapes) -> None:
    experts, width, hidden = shapes["gate_up"]
    if shapes["down"] not in ((experts, hidden, width // 2), (experts, hidden, width)):  # with a gate, without one
        raise ValueError(
            f"gate_up of {experts} experts [{width}, {hidden}] needs down [{hidden}, {width // 2}], or without a gate "
            f"[{hidden}, {width}], not {shapes['down']}"
        )
    if len(shapes["experts"]) != 2:
        raise ValueError(f"experts {shapes['experts']} are not [tokens, top_k]")


def check_low_rank(shapes: Shapes) -> None:
    _, rows, columns = shapes["table"]
    if shapes["y"][1:] != (rows,) or shapes.get("x", (0, columns))[1:] != (columns,):
        given = {name: shapes[name] for name in ("y", "x") if name in shapes}
        raise ValueError(f"adapters of a layer [{rows}, {columns}] do not fit {given}")


def check_mean_rows(shapes: Shapes) -> None:
    if len(shapes["index"]) != 2 or not shapes["index"][1] or len(shapes["x"]) != 2:
        raise ValueError(f"index {shapes['index']} does not say of which rows of x {shapes['x']} the means are")


def check_put_rows(shapes: Shapes) -> None:
    if prod(shapes["rows"][1:]) != prod(shapes["x"][1:]):
        raise ValueError(f"rows {shapes['rows']} do not fit x {shapes['x']}")


def joined_columns(shapes: Shapes) -> tuple[int, ...]:
    return (prod(shapes["x"][1:]) + prod(shapes["y"][1:]),)


def check_all_gather(shapes: Shapes) -> None:
    if len(shapes["x"]) != 2 or shapes["x"][1:] > shapes["width"]:
        raise ValueError(f"x {shapes['x']} is not a rank's columns of {shapes['width'][0]}")


def check_layer_norm(shapes: Shapes) -> None:
    if not shapes["weight"] == shapes["bias"] == shapes["x"][1:]:
        raise ValueError(f"weight {shapes['weight']} and bias {shapes['bias']} do not fit x {shapes['x']}")


def check_norm(shapes: Shapes) -> None:
    """The weight must be as long as a head, or as all heads of a row."""
    x = shapes["x"]
    if shapes["weight"] not in (x[-1:], (prod(x[1:]),)):
        raise ValueError(f"a norm of {shapes['weight']} does not fit x {shapes['x']}")


def check_gated_norm(shapes: Shapes) -> None:
    """The gate must have x's elements; the weight must be as long as a group, or as all groups of a row."""
    check_norm(shapes)
    if prod(shapes["gate"][1:]) != prod(shapes["x"][1:]):
        raise ValueError(f"gate {shapes['gate']} does not fit x {shapes['x']}")


def qkv_slices(num_heads: int, num_kv_heads: int, head_dim: int) -> Sequence[Slice]:
    first_k = num_heads * head_dim
    return (
        Slice(0, num_heads, head_dim),
        Slice(first_k, num_kv_heads, head_dim),
        Slice(first_k + num_kv_heads * head_dim, num_kv_heads, head_dim),
    )


def head_slices(offset: int, num_heads: int, head_dim: int) -> Sequence[Slice]:
    return (Slice(offset, num_heads, head_dim),)
