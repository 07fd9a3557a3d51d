"""MXFP4 for the routed experts: 32 columns share a power-of-two scale (E8M0), each value is one of E2M1's sixteen."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MIDPOINTS = (LEVELS[1:] + LEVELS[:-1]) / 2


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., out, in] -> codes u8 [..., out, in] (bit 3 the sign) and scale bytes u8 [..., out, in / 32].

    Of the two scales that fit the group's largest magnitude (6 x 2^e just below or just above it), the one with the
    smaller squared error is taken.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    low = torch.floor(torch.log2(largest)) - 2
    best_codes, best_error, best_exponent = None, None, low
    for exponent in (low, low + 1):
        scaled = groups * torch.exp2(-exponent)
        codes = torch.bucketize(scaled.abs(), _MIDPOINTS)
        error = ((LEVELS[codes] - scaled.abs()) * torch.exp2(exponent)).square().sum(-1, keepdim=True)
        if best_codes is None or best_error is None:
            best_codes, best_error = codes, error
        else:
            better = error < best_error
            best_codes = torch.where(better, codes, best_codes)
            best_exponent = torch.where(better, exponent, best_exponent)
    assert best_codes is not None
    codes = (best_codes + 8 * (groups < 0)).to(torch.uint8).flatten(-2)
    return codes, (best_exponent.squeeze(-1) + 127).to(torch.uint8)


def dequantise_mxfp4(codes: Tensor, scale: Tensor) -> Tensor:
    magnitude = LEVELS[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    factor = torch.exp2(scale.float() - 127).repeat_interleave(GROUP, -1)
    return magnitude * factor


def fake_quantise_mxfp4(weight: Tensor) -> Tensor:
    """The dequantised value forward, the identity backward."""
    with torch.no_grad():
        delta = dequantise_mxfp4(*mxfp4(weight)) - weight
    return weight + delta
