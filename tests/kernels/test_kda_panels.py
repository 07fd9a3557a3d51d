"""Matrices to panels of sixteen columns and back."""

import numpy as np
import pytest

from serai.kernels.kda_panels import PANEL, panels_of, to_matrices, to_panels


@pytest.mark.parametrize("outer", [(), (3,)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (128, 128), (5, 20), (7, 3)])
def test_a_panel_holds_sixteen_columns_of_every_key_channel(
    outer: tuple[int, ...], key_dim: int, value_dim: int
) -> None:
    heads, panels = 2, panels_of(value_dim)
    matrices = np.arange(np.prod(outer, dtype=int) * heads * key_dim * value_dim, dtype=np.float32) + 1
    matrices = matrices.reshape(*outer, heads, key_dim, value_dim)
    stored = to_panels(matrices)
    assert stored.shape == (*outer, heads * panels, key_dim, PANEL)
    for head in range(heads):
        for column in range(panels * PANEL):
            there = stored[..., head * panels + column // PANEL, :, column % PANEL]
            wanted = matrices[..., head, :, column] if column < value_dim else np.zeros_like(there)
            np.testing.assert_array_equal(there, wanted)
    np.testing.assert_array_equal(to_matrices(stored, heads, value_dim), matrices)


@pytest.mark.parametrize(("heads", "value_dim"), [(1, 16), (2, 16), (1, 32), (2, 7)])
def test_both_ways_give_copies_even_where_nothing_moves(heads: int, value_dim: int) -> None:
    matrices = np.ones((heads, 5, value_dim), np.float32)
    panels = to_panels(matrices)
    back = to_matrices(panels, heads, value_dim)
    assert not np.shares_memory(panels, matrices)
    assert not np.shares_memory(back, panels)
    assert back.flags.c_contiguous
