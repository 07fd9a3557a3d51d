"""Muon for the matrices (orthogonalised momentum, as Kimi's own models were trained), Adam for everything else."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

BY_ADAM = ("embed_tokens", "lm_head", "res_proj", "b_proj", "gate.weight", "conv1d")


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz towards a semi-orthogonal matrix, batched [n, a, b] (coefficients of Jordan et al. 2024)."""
    tall = x.shape[1] > x.shape[2]
    y = (x.transpose(1, 2) if tall else x).bfloat16()
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.transpose(1, 2)
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return (y.transpose(1, 2) if tall else y).float()


class MuonAdam:
    """`step(factor)` applies one update with every learning rate multiplied by `factor`."""

    def __init__(self, model: nn.Module, muon_rate: float = 5e-3, adam_rate: float = 3e-3) -> None:
        self.muon_rate, self.adam_rate = muon_rate, adam_rate
        self.shapes: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        others: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not any(part in name for part in BY_ADAM):
                self.shapes[tuple(parameter.shape[-2:])].append(parameter)
            else:
                others.append(parameter)
        self.momentum = {
            shape: torch.zeros(sum(p.numel() for p in ps) // (shape[0] * shape[1]), *shape)
            for shape, ps in self.shapes.items()
        }
        self.adam = torch.optim.Adam(others, lr=adam_rate, betas=(0.9, 0.98), eps=1e-10)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for shape, parameters in self.shapes.items():
            gradient = torch.cat([p.grad.reshape(-1, *shape) for p in parameters if p.grad is not None])
            momentum = self.momentum[shape]
            momentum.lerp_(gradient, 0.05)
            update = orthogonalise(gradient.lerp(momentum, 0.95))
            rate = self.muon_rate * factor * 0.2 * max(shape) ** 0.5
            offset = 0
            for p in parameters:
                count = p.numel() // (shape[0] * shape[1])
                p.sub_(update[offset : offset + count].view(p.shape), alpha=rate)
                offset += count
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()

    def state(self) -> dict[str, Any]:
        return {"momentum": list(self.momentum.values()), "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.momentum = dict(zip(self.momentum, state["momentum"], strict=True))
        self.adam.load_state_dict(state["adam"])
