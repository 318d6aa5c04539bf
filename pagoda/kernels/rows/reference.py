"""The definition of the ops that only move or add rows."""

import torch


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x + residual, rounded once to their dtype."""
    return x + residual


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor, rounded once."""
    return (x.float() * factor).to(x.dtype)


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x * y [T, D], or y [T, 1, D], rounded once."""
    return x * y.reshape(x.shape)


def scale_rows(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x [T, D] or [T, H, D] times a factor per row, [T, 1], rounded once."""
    return (x.float() * factors.float().view(-1, *[1] * (x.dim() - 1))).to(x.dtype)


def split_qkv(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, (H + 2 K) D] -> views q [T, H, D], k [T, K, D], v [T, K, D]."""
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def select_heads(x: torch.Tensor, offset: int, num_heads: int, head_dim: int) -> torch.Tensor:
    """A view [T, num_heads, head_dim] of each row of x, from element `offset` on."""
    return x.flatten(1)[:, offset : offset + num_heads * head_dim].unflatten(1, (num_heads, head_dim))


def select_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[T, ...], int64 [S] -> [S, ...]; int64 [S, n] -> [S, n * ...]."""
    return x[index] if index.dim() == 1 else x[index].flatten(1)


def mean_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[T, D], int64 [S, n] -> [S, D], rounded once."""
    return x[index].float().mean(dim=1).to(x.dtype)


def put_rows(x: torch.Tensor, rows: torch.Tensor, index: torch.Tensor) -> None:
    """x[index[i]] = rows[i]; [T, ...], [S, ...], int64 [S]."""
    x[index] = rows.reshape(len(rows), *x.shape[1:])


def join(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[T, A], [T, B] -> [T, A + B]."""
    return torch.cat((x.flatten(1), y.flatten(1)), dim=1)
