"""Linear layers of a PyTorch module, repacked for oneDNN in place."""

from __future__ import annotations

import torch

from engine.linear import Linear


class PackedLinear(torch.nn.Module):
    """Stands in for a `torch.nn.Linear`. Its `weight` tells shape and dtype, but holds no numbers and no memory."""

    def __init__(self, plain: torch.nn.Linear, packed: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        nothing = torch.full((1, 1), torch.nan, dtype=plain.weight.dtype).expand(plain.weight.shape)
        self.weight = torch.nn.Parameter(nothing, requires_grad=False)
        self._packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return self._packed(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def pack_linears(model: torch.nn.Module) -> None:
    """Replace every plain `torch.nn.Linear` inside `model`, where this CPU has a packed layout for its dtype."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                bias = None if child.bias is None else child.bias.detach()
                packed = Linear(child.weight.detach().contiguous(), bias)
                if packed.is_packed:
                    setattr(parent, name, PackedLinear(child, packed))
