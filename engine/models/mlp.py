"""The two kinds of MLP: dense, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.linear import Linear


class DenseMlp:
    """``down(silu(gate(x)) * up(x))``; `gate_up` puts out [gate | up]."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._down(self._inner(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual + mlp(x)``, both [T, hidden]; `residual` is left as it is."""
        return self._down.add_to(residual, self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return F.silu(gate).mul_(up)


class SparseMlp:
    """A weighted sum of the few experts that a router chooses for each token.

    The pairs (token, chosen expert) are sorted by expert, so that each expert with work does it in one piece.
    """

    def __init__(self, router: Linear, experts: Sequence[DenseMlp], per_token: int, norm_weights: bool) -> None:
        """`router` puts out a score for each expert; `per_token`, `norm_weights` as in `MoeConfig`."""
        self._router, self._experts = router, tuple(experts)
        self._per_token, self._norm_weights = per_token, norm_weights

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual + mlp(x)``, both [T, hidden]; `residual` is left as it is."""
        tokens, width = x.shape
        weights, chosen = torch.softmax(self._router(x).float(), -1).topk(self._per_token, -1)  # [T, per_token]
        if self._norm_weights:
            weights /= weights.sum(-1, keepdim=True)
        pairs = chosen.reshape(-1)
        order = pairs.argsort(stable=True)
        inputs = x[order // self._per_token]
        outputs = torch.empty_like(inputs)
        start = 0
        for expert, count in enumerate(torch.bincount(pairs, minlength=len(self._experts)).tolist()):
            if count:
                outputs[start : start + count] = self._experts[expert](inputs[start : start + count])
                start += count
        unsorted = torch.empty_like(outputs)
        unsorted[order] = outputs
        mixed = torch.bmm(weights.unsqueeze(1), unsorted.view(tokens, self._per_token, width).float())
        return residual + mixed.squeeze(1).to(residual.dtype)
