"""The definition of a batch's logit constraints: row by row and token by token, in float32."""

import torch

from pagoda.kernels.constraints.batch import BatchConstraints


def constrain(logits: torch.Tensor, constraints: BatchConstraints) -> None:
    """Apply `constraints` to logits float32 [n, V] in place. Raises InvariantBroken for a row or id outside them."""
    constraints.check(*logits.shape)
    each = zip(
        constraints.rows.tolist(),
        constraints.bias.spans(),
        constraints.penalized.spans(),
        constraints.allowed,
        constraints.forbidden.spans(),
        strict=True,
    )
    for i, (row, bias, penalized, allowed, forbidden) in enumerate(each):
        own = logits[row]
        for token, value in zip(constraints.bias.ids[bias], constraints.bias_values[bias], strict=True):
            own[token] += float(value)
        repetition, frequency, presence = (
            torch.tensor(column[i], dtype=torch.float32)
            for column in (constraints.repetition, constraints.frequency, constraints.presence)
        )
        counts = constraints.output_counts[penalized]
        for token, count in zip(constraints.penalized.ids[penalized], counts, strict=True):
            own[token] = own[token] / repetition if own[token] > 0 else own[token] * repetition
            if count:
                own[token] -= frequency * int(count) + presence
        if allowed is not None:
            for token in range(len(own)):
                if token >= len(allowed) or not allowed[token]:
                    own[token] = -torch.inf
        for token in constraints.forbidden.ids[forbidden]:
            own[token] = -torch.inf
