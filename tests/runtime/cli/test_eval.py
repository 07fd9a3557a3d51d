"""`serai eval`: the arrays of the contract in a file, and a failure that says where."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from serai.runtime.cli import opening
from serai.runtime.cli.main import app
from serai.runtime.cli.opening import OpenedModel
from serai.runtime.models.config import LayerKind, load_config
from tests.runtime.fake_model import Flaw, loaded_fake
from tests.shared import shared

runner = CliRunner()


def use_fake(monkeypatch: pytest.MonkeyPatch, flaw: Flaw | None = None) -> None:
    @contextmanager
    def open_fake(*_: object, **__: object) -> Iterator[OpenedModel]:
        loaded = loaded_fake(flaw)
        yield OpenedModel(cast(Any, SimpleNamespace(config=loaded.model.config)), loaded, 1 << 30)

    monkeypatch.setattr(opening, "open_model", open_fake)


def tokens_file(folder: Path, tokens: object) -> str:
    np.save(folder / "tokens.npy", np.asarray(tokens))
    return str(folder / "tokens.npy")


def test_the_file_holds_what_the_contract_names_and_the_three_logits_are_equal(nano: Path, tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, np.random.default_rng(3).integers(0, 1024, 30))
    out = tmp_path / "out.npz"
    result = runner.invoke(app, ["eval", str(nano), "--tokens", tokens, "--split", "7", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert (values["equal"], values["difference"], values["split"]) == (True, None, 7)
    config = load_config(nano)
    with np.load(out) as arrays:
        for name in ("prefill_logits", "decode_logits", "step_logits"):
            assert arrays[name].shape == (30, config.vocab_size)
            assert arrays[name].dtype == np.float32
            assert arrays[name].tobytes() == arrays["prefill_logits"].tobytes()
        assert arrays["greedy"].tolist() == values["greedy"]
        assert len(values["greedy"]) == 24
        for layer, kind in enumerate(config.layer_kinds):
            wanted = ("kda", "conv") if kind is LayerKind.KDA else ("latents",)
            for part in wanted:
                assert arrays[f"state_{layer}_{part}"].dtype == np.float32


def test_an_8_bit_trunk_says_nearly_the_same(nano: Path, tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, np.random.default_rng(3).integers(0, 1024, 6))
    logits = []
    for trunk in ("as stored", "q8"):
        out = tmp_path / "out.npz"
        options = [] if trunk == "as stored" else ["--trunk", trunk]
        arguments = ["--tokens", tokens, "--out", str(out), "--greedy", "0", *options, "--json"]
        result = runner.invoke(app, ["eval", str(nano), *arguments])
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["trunk"] == trunk
        with np.load(out) as arrays:
            logits.append(arrays["prefill_logits"])
    assert 0 < np.linalg.norm(logits[1] - logits[0]) / np.linalg.norm(logits[0]) < 0.1


def test_it_agrees_with_an_independent_implementation(tmp_path: Path) -> None:
    folder = shared("oracle", "kimi_k3_f32")
    out = tmp_path / "out.npz"
    with np.load(folder / "ref_mlx.npz") as reference:
        split = str(int(reference["split"]))
        arguments = ["--tokens", str(folder / "tokens.npy"), "--split", split, "--out", str(out)]
        result = runner.invoke(app, ["eval", str(folder), *arguments])
        assert result.exit_code == 0, result.stderr
        with np.load(out) as found:
            for name in ("prefill_logits", "decode_logits", "step_logits"):
                error = np.sqrt(np.square(found[name] - reference[name]).mean() / np.square(reference[name]).mean())
                assert error <= 5e-5, name
            np.testing.assert_array_equal(found["greedy"], reference["greedy"])


def test_a_difference_is_named_and_fails_but_the_arrays_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_fake(monkeypatch, Flaw.ROW_IN_CALL)
    tokens, out = tokens_file(tmp_path, np.arange(12)), tmp_path / "out.npz"
    result = runner.invoke(app, ["eval", "fake", "--tokens", tokens, "--split", "4", "--out", str(out), "--json"])
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert values["equal"] is False
    assert "decode_logits first differ from prefill_logits at position 3" in values["difference"]
    assert values["difference"] in result.stderr
    assert out.is_file()


@pytest.mark.parametrize(
    ("tokens", "extra", "words"),
    [
        (np.zeros((2, 3), np.int64), [], "shape (2, 3)"),
        (np.array([1, 2**40]), [], "vocabulary runs from 0 to 1,023"),
        (np.array([1.5]), [], "float64"),
        (np.array(["a"], dtype=object), [], "can't be read as a .npy file"),
        (np.array([1, 2, 3]), ["--split", "4"], "split is 4"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_sentence(
    tokens: np.ndarray, extra: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_fake(monkeypatch)
    out = tmp_path / "out.npz"
    arguments = ["--tokens", tokens_file(tmp_path, tokens), "--out", str(out), *extra, "--json"]
    result = runner.invoke(app, ["eval", "fake", *arguments])
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "BadParameter"
    assert words in error["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens.npy"]


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00"])
def test_a_damaged_token_file_is_refused(content: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_fake(monkeypatch)
    (tmp_path / "t.npy").write_bytes(content)
    result = runner.invoke(app, ["eval", "fake", "--tokens", str(tmp_path / "t.npy"), "--out", str(tmp_path / "o.npz")])
    assert result.exit_code == 1
    assert "t.npy can't be read as a .npy file of token ids" in result.stderr


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    arguments = ["--tokens", tokens_file(tmp_path, [1, 2]), "--out", str(tmp_path / "missing" / "o.npz")]
    result = runner.invoke(app, ["eval", "/no/such/model", *arguments])
    assert result.exit_code == 1
    assert "--out is" in result.stderr
