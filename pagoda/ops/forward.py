"""The op table: every op that a model's forward may call, each declared once.

A model only computes with these ops, so the same declarative forward runs on the reference kernels, on the native CPU
ones, on a GPU, or is recorded once and replayed.

Shapes: T tokens, H query heads, K KV heads, D head size, S selected rows, E experts. x may be float32, bfloat16 or
float16; sums are in float32. An op returns a new tensor. Every op gives each row the same bits whatever other rows are
in the batch (the native kernels; the torch versions as far as torch's own library does).
"""

from math import inf, prod
from typing import Protocol

from pagoda.ops.batch import AttentionMetadata, KVLayer
from pagoda.ops.declare import (
    Activation,
    Cache,
    DType,
    Experts,
    Group,
    Out,
    Rows,
    Slots,
    Table,
    declared_ops,
    like,
    op,
    view,
)
from pagoda.ops.shape_rules import (
    check_all_gather,
    check_by_head,
    check_factors,
    check_gate_up,
    check_gated_delta,
    check_gated_norm,
    check_latent,
    check_layer_norm,
    check_low_rank,
    check_mamba2,
    check_mean_rows,
    check_moe,
    check_norm,
    check_paged,
    check_product,
    check_put_rows,
    check_rotary_write,
    check_route,
    check_short_conv,
    check_tables,
    check_text,
    check_written,
    head_slices,
    joined_columns,
    qkv_slices,
    selected_shape,
    state_outputs,
)
from pagoda.ops.tensor import ExpertWeights, LinearWeight, LowRankTable, RankGroup, Tensor

F32, I32, I64 = DType.F32, DType.I32, DType.I64


class ForwardOps(Protocol):
    """What a forward receives. Each method's reference is `kernels/<op>/reference.py`."""

    @op("linear", x=Rows(), out=Out("x", lambda s: s["weight"][:1]))
    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """[T, in] -> [T, out] = x @ weight.T + bias, in x's dtype."""
        ...

    @op("linear", check_by_head, x=Rows(), out=Out("x", lambda s: s["weight"][:1]))
    def linear_by_head(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """[T, H, in] -> [T, H * out]: head h times rows h * out .. of weight [H * out, in]; in x's dtype."""
        ...

    @op("linear", x=Rows(), out=Out("x", lambda s: s["weight"][:1], F32))
    def logits(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """[S, in] -> float32 [S, vocab]."""
        ...

    @op(
        "embedding",
        token_ids=Rows(I32, below="table"),
        table=Table(packed=True),
        out=Out("token_ids", lambda s: s["table"][1:], "table"),
    )
    def embedding(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """int32 [T], [vocab, hidden] -> [T, hidden]; scale is rounded to the table's dtype first (Gemma does)."""
        ...

    @op(
        "embedding",
        token_ids=Rows(I32),
        table=Table(packed=True),
        out=Out("token_ids", lambda s: s["table"][1:], "table"),
    )
    def partial_embedding(self, token_ids: Tensor, table: Tensor, first: int, scale: float = 1.0) -> Tensor:
        """`embedding` with the rows of the ids from `first` on; an id whose row is not in the table gives zeros."""
        ...

    @op("norm", check_norm, x=Rows(), weight=Table("x"), out=like("x"))
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        """x [..., D] / rms(x) * weight [D], over the last dimension; unit_offset: * (1 + weight).

        A weight [H D] of x [T, H, D] norms all heads of a token as one vector.
        """
        ...

    @op(
        "norm",
        check_norm,
        x=Rows(contiguous=True),
        residual=Rows("x", like="x", contiguous=True),
        weight=Table("x"),
        out=like("x"),
        total=like("x"),
    )
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is rounded to x's dtype before it is normed."""
        ...

    @op(
        "norm",
        check_gated_norm,
        x=Rows(),
        gate=Rows("x"),
        weight=Table("x"),
        out=Out("x", lambda s: (prod(s["x"][1:]),)),
    )
    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
        """rms_norm(x) * silu(gate), or with gate_first rms_norm(x * silu(gate)), over the last dimension of x.

        x: [T, D] or [T, G, D] -> [T, G * D].   gate: as many elements per token.
        weight: [D] for all groups, or [G * D].
        """
        ...

    @op("norm", check_layer_norm, x=Rows(contiguous=True), weight=Table("x"), bias=Table("x"), out=like("x"))
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x [T, D] - mean) / sqrt(variance + eps) * weight [D] + bias [D], over the last dimension."""
        ...

    @op(
        "norm",
        check_layer_norm,
        x=Rows(contiguous=True),
        residual=Rows("x", like="x", contiguous=True),
        weight=Table("x"),
        bias=Table("x"),
        out=like("x"),
        total=like("x"),
    )
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(layer_norm(x + residual), x + residual); the sum is rounded to x's dtype before it is normed."""
        ...

    @op("rows", x=Rows(contiguous=True), residual=Rows("x", like="x", contiguous=True), out=like("x"))
    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual."""
        ...

    @op("rows", x=Rows(), out=like("x"))
    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * factor."""
        ...

    @op("rows", check_product, x=Rows(), y=Rows("x"), out=like("x"))
    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """x * y, element by element: x [T, D], y [T, D] or one head of it, [T, 1, D]."""
        ...

    @op("rows", check_factors, x=Rows(), factors=Rows(contiguous=True), out=like("x"))
    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        """x [T, D] or [T, H, D] times a factor per row, [T, 1]."""
        ...

    @op(
        "rotary",
        check_tables,
        q=Rows(),
        k=Rows("q"),
        positions=Rows(I32, below="cos", contiguous=True),
        cos=Table(F32),
        sin=Table(F32),
        rotated_q=like("q"),
        rotated_k=like("k"),
    )
    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [T, H, D] and k [T, K, D] (NeoX halves). cos, sin float32 [max_position, D / 2].

        positions: int32 [T], or [T, R]: pair j of a head is at position j // (D / 2 / R) of its row.
        """
        ...

    @op(
        "kv_cache",
        check_written,
        k=Rows(),
        v=Rows("k"),
        cache=Cache(writes=True),
        metadata=Group(Slots.WRITTEN, "cache"),
    )
    def write_kv(self, k: Tensor, v: Tensor, cache: KVLayer, metadata: AttentionMetadata) -> None:
        """Write k [T, K, D] and v [T, K, its own D] at slot_mapping."""
        ...

    @op(
        "kv_cache",
        check_rotary_write,
        q=Rows(),
        k=Rows("q"),
        v=Rows("k"),
        positions=Rows(I32, below="cos", contiguous=True),
        cos=Table(F32),
        sin=Table(F32),
        cache=Cache(writes=True),
        metadata=Group(Slots.WRITTEN, "cache"),
        rotated_q=like("q"),
    )
    def rotary_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """`rotary` and `write_kv` in one: writes the rotated k and v, returns the rotated q."""
        ...

    @op(
        "attention",
        check_paged,
        q=Rows(),
        cache=Cache(writes=False),
        metadata=Group(Slots.QUERIES, "cache"),
        bias=Table(F32, optional=True),
        sinks=Table("q", optional=True),
        out=Out("q", lambda s: (s["q"][1] * s["q"][2],)),
    )
    def attention(
        self,
        q: Tensor,
        cache: KVLayer,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        bias: Tensor | None = None,
        first: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal paged attention, q [T, H, D] -> [T, H * D].

        window: the last `window` tokens, itself included (0: all); if it is negative, those of its own chunk, where a
        chunk is positions n * -window to (n + 1) * -window - 1. softcap: scores become softcap * tanh(score / softcap)
        (0: off). Reads the pages in place.
        bias: float32 [heads, 2 * M + 1], None for none: bias[head, M + distance] is added to a score, where distance is
        the key's position less the query's, and M or -M if it is larger or less.
        sinks: [heads], None for none: in the softmax, each head has a score of its own, of no value.
        first: the heads of q begin at this one of the bias and the sinks.
        """
        ...

    @op(
        "attention",
        check_latent,
        q=Rows(),
        q_rotated=Rows("q"),
        cache=Cache(writes=False),
        metadata=Group(Slots.QUERIES, "cache"),
        out=like("q"),
    )
    def latent_attention(
        self, q: Tensor, q_rotated: Tensor, cache: KVLayer, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """Causal paged attention of all heads to one, whose value v [L] is also the first part of its key, (v, k).

        q: [T, H, L], multiplies v.   q_rotated: [T, H, R], multiplies k [R].   -> [T, H, L].
        """
        ...

    @op(
        "attention",
        check_text,
        q=Rows(),
        k=Rows("q"),
        v=Rows("k", like="k"),
        metadata=Group(Slots.QUERIES),
        bias=Table(F32, optional=True),
        out=Out("q", lambda s: (s["q"][1] * s["q"][2],)),
    )
    def bidirectional_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        bias: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Attention of every token of a request to all of its tokens; q [T, H, D], k, v [T, K, D] -> [T, H * D].

        Reads no cache: all tokens of a request must be in the batch, one request after the other without padding.
        window: only tokens less than `window` positions away (0: all).   softcap, bias, first: as in `attention`.
        """
        ...

    @op(
        "recurrent",
        check_short_conv,
        x=Rows(),
        weight=Table("x"),
        bias=Table("x", optional=True),
        states=Cache(writes=True, states=True),
        metadata=Group(Slots.QUERIES, "states"),
        out=Out("x", lambda s: s["weight"][1:]),
    )
    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: KVLayer,
        metadata: AttentionMetadata,
        silu: bool = False,
    ) -> Tensor:
        """Causal depthwise convolution over each row's tokens, x [T, D] or [T, 1, D] -> [T, D].

        out[t] = bias + weight[0] * x[t - L + 1] + ... + weight[L - 1] * x[t], summed in float32 in this order; what is
        before a row's first token is 0.   weight: [L, D].   bias: [D] or None.   silu: of the unrounded sum.
        states: x of the L - 1 tokens before a position, oldest first, [L - 1, 1, D] per block of `states.k`. A row that
        goes on at position p reads the block of p - 1; each block that it computes tokens of then has the state after
        the last of them. Rows are computed in order: one may go on from a state that a row before it leaves in the same
        step. The null block is read as zeros and not written.
        """
        ...

    @op(
        "recurrent",
        check_mamba2,
        x=Rows(),
        dt=Rows("x"),
        rate=Table(F32),
        dt_bias=Table(F32),
        d=Table(F32),
        states=Cache(writes=True, states=True),
        metadata=Group(Slots.QUERIES, "states"),
        out=Out("x", state_outputs),
    )
    def mamba2(
        self,
        x: Tensor,
        dt: Tensor,
        rate: Tensor,
        dt_bias: Tensor,
        d: Tensor,
        states: KVLayer,
        metadata: AttentionMetadata,
        dt_min: float = 0.0,
        dt_max: float = inf,
    ) -> Tensor:
        """Mamba-2's recurrence over each row's tokens, x [T, H * V + 2 * G * K] -> [T, H * V].

        x: of each token, values v of H heads, then b and c [K] of G groups of as many adjacent heads each.
        dt: [T, H].   rate, dt_bias, d: float32 [H].
        With s = softplus(dt + dt_bias), limited to dt_min .. dt_max, a head's state S [K, V], zeros at first, becomes
        exp(rate * s) * S + b (s * v)^T, and the token gives c^T S + d * v. All in float32, rounded once.
        states: S of all heads, float32 [H, K, V] per block of `states.v`, read and left as those of `short_conv`.
        """
        ...

    @op(
        "recurrent",
        check_gated_delta,
        x=Rows(),
        a=Rows("x"),
        b=Rows("x", like="a"),
        rate=Table(F32),
        dt_bias=Table(F32),
        states=Cache(writes=True, states=True),
        metadata=Group(Slots.QUERIES, "states"),
        out=Out("x", state_outputs),
    )
    def gated_delta(
        self,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        rate: Tensor,
        dt_bias: Tensor,
        states: KVLayer,
        metadata: AttentionMetadata,
        tiled: bool = False,
    ) -> Tensor:
        """The gated delta rule over each row's tokens, x [T, 2 * G * K + H * V] -> [T, H * V].

        x: of each token, q and k [K] of G groups of as many heads each, then v of H heads.
        tiled: head h is of group h % G; otherwise the heads of a group are adjacent.
        a, b: [T, H].   rate, dt_bias: float32 [H].
        q and k are divided by their lengths, sqrt(sum + 1e-6), and q by sqrt(K). A head's state S [K, V], zeros at
        first, is multiplied by exp(rate * softplus(a + dt_bias)), then k (sigmoid(b) * (v - S^T k))^T is added;
        the token gives S^T q. All in float32, rounded once.   states: as in `mamba2`.
        """
        ...

    @op("activation", x=Rows(), out=like("x"))
    def activate(self, x: Tensor, kind: Activation) -> Tensor:
        """kind(x), element by element."""
        ...

    @op(
        "activation",
        check_gate_up,
        gate_up=Rows(contiguous=True),
        out=Out("gate_up", lambda s: (s["gate_up"][1] // 2,)),
    )
    def gate(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """[T, 2 I] (gate then up) -> kind(gate) * up, [T, I]."""
        ...

    @op("activation", x=Rows(contiguous=True), out=like("x"))
    def xielu(self, x: Tensor, above: float, below: float, linear: float, limit: float) -> Tensor:
        """above x^2 + linear x for x above 0, below (exp(min(x, limit)) - 1 - x) + linear x elsewhere."""
        ...

    @op(
        "moe",
        check_route,
        router_logits=Rows(),
        bias=Table(F32, optional=True),
        factors=Table(F32, optional=True),
        experts=Out("router_logits", lambda s: s["top_k"], I64, below="router_logits"),
        weights=Out("router_logits", lambda s: s["top_k"], F32),
    )
    def route(
        self,
        router_logits: Tensor,
        top_k: int,
        renormalize: bool,
        sigmoid: bool = False,
        bias: Tensor | None = None,
        groups: int = 1,
        top_groups: int = 1,
        best: int = 1,
        factor: float = 1.0,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose each token's top_k experts -> (experts int64 [T, top_k], weights float32 [T, top_k]), the best first.

        router_logits: [T, E], any float dtype; all is computed in float32. Of equals the lower expert is better.
        An expert's score is the softmax over all experts, or the sigmoid of its logit. Its weight is the score
        (renormalize: over the sum of those chosen; Mixtral; Qwen3-MoE where norm_topk_prob says so) times factor, and
        times its own of `factors`, [E] or None.
        bias: [E] or None. Without it, the largest logits are chosen. With it, the largest score + bias, of experts in
        those top_groups of `groups` equal groups whose `best` largest of these have the largest sums (DeepSeek).
        """
        ...

    @op(
        "moe",
        check_moe,
        x=Rows(),
        experts=Rows(I64, below="gate_up", contiguous=True),
        weights=Rows(F32, like="experts", contiguous=True),
        gate_up=Experts(of="x"),
        down=Experts(of="x", directly=False),
        out=like("x"),
    )
    def moe(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        activation: Activation = Activation.SILU,
        alpha: float = 1.0,
        limit: float = 0.0,
        scales_input: bool = False,
    ) -> Tensor:
        """Sum the MLPs of each token's experts by weight, [T, hidden] -> [T, hidden].

        experts, weights: of `route`.   gate_up: E weights [2 I, hidden], gate then up; without gates [I, hidden].
        down: E weights [hidden, I].
        An expert computes down(activation(gate(x)) * up(x)), without a gate down(activation(up(x))). With a limit
        (GPT-OSS), gate is at most that, up at most as far from 0, and it computes
        down(gate * sigmoid(alpha * gate) * (up + 1)). The weighted sum is in float32, in the order of a token's
        experts, and rounded once to x's dtype.
        scales_input: a weight multiplies what the expert reads, which is rounded to x's dtype, in place of its output
        (Llama 4).
        """
        ...

    @view("rows", qkv_slices, qkv=Rows())
    def split_qkv(self, qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """[T, (H + 2 K) D] -> q [T, H, D], k [T, K, D], v [T, K, D]; views where possible."""
        ...

    @view("rows", head_slices, x=Rows())
    def select_heads(self, x: Tensor, offset: int, num_heads: int, head_dim: int) -> Tensor:
        """Heads [T, num_heads, head_dim] from element `offset` of each row of x on, a view where possible."""
        ...

    @op(
        "rows",
        x=Rows(any_domain=True),
        index=Rows(I64, below="x", contiguous=True),
        out=Out("index", selected_shape, "x"),
    )
    def select_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """[T, hidden], int64 [S] -> [S, hidden]; int64 [S, n] -> [S, n * hidden], n rows after each other."""
        ...

    @op(
        "rows",
        check_mean_rows,
        x=Rows(contiguous=True, any_domain=True),
        index=Rows(I64, below="x", contiguous=True),
        out=Out("index", lambda s: s["x"][1:], "x"),
    )
    def mean_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """[T, hidden], int64 [S, n] -> [S, hidden]: the mean of n rows, summed in float32 in their order."""
        ...

    @op(
        "rows",
        check_put_rows,
        x=Rows(contiguous=True, any_domain=True, writes=True),
        rows=Rows("x"),
        index=Rows(I64, below="x"),
    )
    def put_rows(self, x: Tensor, rows: Tensor, index: Tensor) -> None:
        """x[index[i]] = rows[i], in place: x [T, hidden], rows [S, hidden] or one head of them, [S, 1, hidden]; index
        int64 [S] without repeats.
        """
        ...

    @op("rows", x=Rows(), y=Rows("x"), out=Out("x", joined_columns))
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """[T, A], [T, B] -> [T, A + B]."""
        ...

    @op("low_rank", check_low_rank, y=Rows(writes=True), x=Rows(), adapters=Rows(I32, below="table"))
    def add_low_rank(self, y: Tensor, x: Tensor, adapters: Tensor, table: LowRankTable) -> None:
        """Add to each row of y [T, out] the product of its x [T, in] with the low-rank weights of its adapter.

        adapters: [T], slots of the table; 0, and a slot that is empty, leave the row as it is.
        Of each piece of a slot: y[first_row : first_row + rows] += b @ round(a @ x) + bias, summed in float32;
        `round` is to x's dtype, and y is rounded once per piece.
        """
        ...

    @op("low_rank", check_low_rank, y=Rows(writes=True), token_ids=Rows(I32), adapters=Rows(I32, below="table"))
    def add_low_rank_embedding(self, y: Tensor, token_ids: Tensor, adapters: Tensor, table: LowRankTable) -> None:
        """`add_low_rank` where x is one-hot: `a @ x` is the column of `a` that a token id names.

        token_ids: [T]; an id beyond the columns leaves the row as it is.
        """
        ...

    @op("activation", x=Rows(contiguous=True), out=like("x"))
    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""
        ...

    @op("collectives", x=Rows(contiguous=True), out=like("x"))
    def all_reduce(self, x: Tensor, ranks: RankGroup) -> Tensor:
        """Sum the ranks' x [T, ...] in float32, in the order of the ranks; rounded once to x's dtype."""
        ...

    @op("collectives", check_all_gather, x=Rows(contiguous=True), out=Out("x", lambda s: s["width"]))
    def all_gather(self, x: Tensor, width: int, ranks: RankGroup) -> Tensor:
        """Concatenate the ranks' x [T, columns of this rank] in the order of the ranks -> [T, width]."""
        ...

    @op("collectives", x=Rows(contiguous=True))
    def send_rows(self, x: Tensor, ranks: RankGroup) -> None:
        """Send x [T, ...] to this rank in the next stage."""
        ...

    @op("collectives", token_ids=Rows(I32), like=Table(), out=Out("token_ids", lambda s: s["like"], "like"))
    def receive_rows(self, token_ids: Tensor, like: Tensor, ranks: RankGroup) -> Tensor:
        """Return what this rank in the stage before sent: a row per token, with the shape and dtype of `like`."""
        ...


class FusedOps(Protocol):
    """Ops that a recorded forward has in place of two others, with their bits. Models do not call them."""

    @op("linear", x=Rows(), out=Out("x", lambda s: s["weight"][:1]))
    def linear_activate(self, x: Tensor, weight: LinearWeight, kind: Activation) -> Tensor:
        """activate(linear(x, weight), kind)."""
        ...

    @op("linear", x=Rows(), out=Out("x", lambda s: (s["weight"][0] // 2,)))
    def linear_gate(self, x: Tensor, weight: LinearWeight, kind: Activation) -> Tensor:
        """gate(linear(x, weight), kind); the weight's halves are a whole number of panels each."""
        ...


FORWARD_OPS = declared_ops(ForwardOps)
FUSED_OPS = declared_ops(FusedOps)
OP_TABLE = FORWARD_OPS | FUSED_OPS
"""Every op by name."""

FUSIONS = {("linear", "activate"): "linear_activate", ("linear", "gate"): "linear_gate"}
"""(op, the only user of its result) -> the op that does both."""
