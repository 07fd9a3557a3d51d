"""What `serai eval` writes: shapes, the three logits, greedy tokens and the state by layer."""

import numpy as np
import pytest

from serai.checkpoints.snapshot import LatentType
from serai.runtime.checks.evaluation import WAYS, evaluate, first_difference
from serai.runtime.errors import BadParameter
from serai.runtime.models.config import LayerKind
from tests.runtime.fake_model import Flaw, loaded_fake

TOKENS = np.random.default_rng(5).integers(0, 1024, 300)


@pytest.mark.parametrize("latents", LatentType)
def test_every_array_has_its_documented_shape(latents: LatentType) -> None:
    loaded = loaded_fake(latents=latents)
    arrays = evaluate(loaded, TOKENS[:70], 20)
    config = loaded.model.config
    for way in WAYS:
        assert arrays[way].shape == (70, config.vocab_size)
        assert arrays[way].dtype == np.float32
    assert arrays["greedy"].shape == (24,)
    for layer, kind in enumerate(config.layer_kinds):
        if kind is LayerKind.KDA:
            assert arrays[f"state_{layer}_kda"].shape == (4, 32, 32)
            assert arrays[f"state_{layer}_conv"].shape == (3, 3, 128)
        else:
            assert arrays[f"state_{layer}_latents"].shape == (70, 80)
            assert arrays[f"state_{layer}_latents"].dtype == np.float32
    assert first_difference(arrays) is None


def test_a_call_longer_than_the_models_rows_gives_the_same_bits_as_single_tokens() -> None:
    arrays = evaluate(loaded_fake(), TOKENS, 299, greedy=0)
    assert len(TOKENS) > 256
    assert first_difference(arrays) is None
    assert len(arrays["greedy"]) == 0


@pytest.mark.parametrize("kda_head_dim", [16, 24, 32])
def test_the_state_is_the_one_after_the_last_token_and_greedy_leaves_it_alone(kda_head_dim: int) -> None:
    """In heads of 16 columns a state lies as it is given out, and must be a copy of its memory all the same."""
    fake = loaded_fake(kda_head_dim=kda_head_dim)
    short, long = (evaluate(fake, TOKENS[:70], 20, greedy=count) for count in (0, 24))
    for name in short:
        if name.startswith("state_"):
            np.testing.assert_array_equal(short[name], long[name])


def test_greedy_takes_the_likeliest_token_each_time() -> None:
    loaded = loaded_fake()
    arrays = evaluate(loaded, TOKENS[:10], 5, greedy=3)
    tokens = TOKENS[:10]
    for expected in arrays["greedy"].tolist():
        last = evaluate(loaded, tokens, 1, greedy=0)["prefill_logits"][-1]
        assert int(np.argmax(last)) == expected
        tokens = np.append(tokens, expected)


def test_one_token_is_enough() -> None:
    assert first_difference(evaluate(loaded_fake(), TOKENS[:1], 1)) is None


def test_a_difference_is_named_with_its_place() -> None:
    difference = first_difference(evaluate(loaded_fake(Flaw.ROW_IN_CALL), TOKENS[:12], 4, greedy=0))
    assert difference is not None
    assert (difference.way, difference.position) == ("decode_logits", 3)
    assert "decode_logits first differ from prefill_logits at position 3, in 1,024 values" in str(difference)


def test_bits_are_compared_not_numbers() -> None:
    zero, minus_zero = np.zeros((1, 2), np.float32), np.array([[0.0, -0.0]], np.float32)
    nan = np.full((1, 2), np.nan, np.float32)
    assert first_difference(dict.fromkeys(WAYS, nan)) is None
    assert first_difference({WAYS[0]: zero, WAYS[1]: zero, WAYS[2]: minus_zero}) is not None


@pytest.mark.parametrize(
    ("tokens", "split", "words"),
    [
        (np.zeros((2, 2), np.int64), 1, r"not an array of int64 with shape \(2, 2\)"),
        (np.zeros(0, np.int64), 1, "at least 1 integer"),
        (np.zeros(3), 1, "not an array of float64"),
        (np.array([5, 1024]), 1, "tokens hold 1024, but this model's vocabulary runs from 0 to 1,023"),
        (np.array([-1]), 1, "tokens hold -1"),
        (np.array([1, 2]), 0, "split is 0, but must be from 1 to the number of tokens, which is 2"),
        (np.array([1, 2]), 3, "split is 3"),
    ],
)
def test_tokens_and_splits_that_cannot_be_are_refused(tokens: np.ndarray, split: int, words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        evaluate(loaded_fake(), tokens, split)
