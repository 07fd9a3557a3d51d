"""The nano trainer: its fast form against the definition, its export against an independent forward pass, its markup
against the release's."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from examples.train_nano import data, markup
from examples.train_nano.tokenizer import NanoTokenizer
from serai.runtime.bench import recall_facts as facts
from tests.shared import ROOT, shared

ASSET = ROOT / "runtime" / "assets" / "nano"

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: the nano trainer itself cannot be tested"
)


def small_config() -> Any:
    from examples.train_nano.model import NanoConfig

    return NanoConfig(
        hidden_size=64, num_hidden_layers=5, full_attn_layers=(2, 5), attn_res_block_size=2, num_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32, v_head_dim=32, intermediate_size=96, num_experts=4, moe_intermediate_size=32,
        routed_expert_hidden_size=32,
    )  # fmt: skip


def random_model() -> Any:
    """A small model whose zero-initialised and neutral parameters are made to matter."""
    import torch

    from examples.train_nano.model import NanoModel

    torch.manual_seed(3)
    model = NanoModel(small_config()).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "norm" in name or "A_log" in name or "score_correction" in name:
                value.add_(0.2 * torch.randn_like(value))
            elif "res_proj" in name or "lm_head" in name:
                value.normal_(std=0.3)
    return model


def kda_inputs(time: int) -> tuple[Any, ...]:
    import torch
    import torch.nn.functional as F  # noqa: N812

    torch.manual_seed(time)
    shape = (2, time, 3, 32)
    q, k, v = F.normalize(torch.randn(shape), dim=-1), F.normalize(torch.randn(shape), dim=-1), torch.randn(shape)
    g = -5 * torch.sigmoid(6 * torch.randn(shape))  # the whole range of the bounded gate
    return q, k, v, g, torch.sigmoid(2 * torch.randn(shape[:3])), torch.randn(2, 3, 32, 32)


def relative(a: Any, b: Any) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@needs_torch
@pytest.mark.parametrize("time", [1, 15, 16, 17, 64, 83])
def test_chunked_kda_equals_the_step_by_step_definition_in_output_and_state(time: int) -> None:
    from examples.train_nano.kda import chunked, step_by_step

    inputs = kda_inputs(time)
    o, state = step_by_step(*(x.double() for x in inputs))
    got_o, got_state = chunked(*inputs)
    assert relative(got_o, o) < 5e-6
    assert relative(got_state, state) < 5e-6


@needs_torch
def test_gradients_of_the_chunked_and_of_the_compiled_kda_equal_those_of_the_definition() -> None:
    from examples.train_nano import native
    from examples.train_nano.kda import chunked, step_by_step

    inputs = kda_inputs(37)[:5]
    wanted = [x.double().requires_grad_() for x in inputs]
    o = step_by_step(*wanted)[0]
    o.square().sum().backward()
    forms: list[Any] = [lambda *x: chunked(*x)[0]]
    if native.library() is not None:
        forms.append(native.recurrence)
    for form in forms:
        leaves = [x.clone().requires_grad_() for x in inputs]
        got: Any = form(*leaves)
        got.square().sum().backward()
        assert relative(got, o) < 5e-6
        for leaf, want in zip(leaves, wanted, strict=True):
            assert relative(leaf.grad, want.grad) < 2e-5


@needs_torch
def test_the_compiled_model_equals_the_plain_torch_model_in_logits_and_every_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    import torch.nn.functional as F  # noqa: N812

    from examples.train_nano import native

    if native.library() is None:
        pytest.skip("no g++: the compiled functions are not used here")
    model = random_model()
    ids = torch.randint(0, model.config.vocab_size, (2, 21), generator=torch.Generator().manual_seed(1))
    results = []
    for setting in ("1", "0"):
        monkeypatch.setenv("NANO_NATIVE", setting)
        model.zero_grad()
        logits = model(ids)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(list(model.parameters())) - 1  # layer 0 reads the embedding: no residual mix there
    for a, b in zip(*results, strict=True):
        assert relative(a, b) < 5e-3


@needs_torch
def test_the_export_read_by_the_reference_equals_the_training_model_with_fake_quantisation(tmp_path: Path) -> None:
    import torch

    from examples.train_nano.export import export, rounded
    from examples.train_nano.load import load_folder
    from examples.train_nano.reference import reference_logits

    model = random_model()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    assert export(model, tmp_path, tmp_path / "out") < 8_000_000
    rounded(model)
    model.set_quantised(True)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 40).tolist()
    with torch.no_grad():
        trained = model(torch.tensor([tokens]))[0].double().numpy()
        loaded = load_folder(tmp_path / "out")(torch.tensor([tokens]))[0].double().numpy()
    reference = reference_logits(tmp_path / "out", tokens)
    scale = np.abs(reference).max()
    assert np.abs(loaded - trained).max() < 1e-5 * scale
    assert np.abs(reference - trained).max() < 1e-4 * scale


@needs_torch
def test_mxfp4_rounds_to_the_nearest_level_and_keeps_what_is_already_representable() -> None:
    import torch

    from examples.train_nano.quantise import LEVELS, dequantise_mxfp4, mxfp4

    torch.manual_seed(0)
    weight = torch.randn(5, 96) * torch.logspace(-4, 1, 5).unsqueeze(1)
    kept = dequantise_mxfp4(*mxfp4(weight))
    assert relative(kept, weight) < 0.13
    assert torch.equal(dequantise_mxfp4(*mxfp4(kept)), kept)
    levels = torch.cat((LEVELS, -LEVELS, LEVELS, -LEVELS)).unsqueeze(0) * 2.0**-7
    assert torch.equal(dequantise_mxfp4(*mxfp4(levels)), levels)


def test_markup_equals_the_golden_segments_of_the_release() -> None:
    golden = json.loads(shared("goldens", "xtml", "cases.json").read_text())
    beyond = {"tool_choice", "response_format", "image_prompts"}
    checked = 0
    for case in golden:
        arguments = case["arguments"]
        if beyond & set(arguments) or any("tools" in message for message in arguments["messages"]):
            continue  # notes, images and dynamic tools are never trained on
        assert [[s.text, s.is_markup] for s in markup.render(**arguments)] == case["segments"], case["name"]
        checked += 1
    assert checked >= 15


def test_a_training_row_is_a_function_of_its_seed_and_weighs_every_value_fully() -> None:
    tokenizer = NanoTokenizer(ASSET)
    ids, weights = data.training_row(7, 256, tokenizer)
    again, _ = data.training_row(7, 256, tokenizer)
    assert len(ids) == len(weights) == 257
    assert np.array_equal(ids, again)
    item = data.Dialogue(False, None, [])
    item.add("user", "What is the code of the red box?")
    answer = "The code of the red box is 4172."
    item.add("assistant", answer, [(answer.index("4172"), answer.index("4172") + 4)])
    ids, weights = data.tokens_and_weights(item, tokenizer)
    assert tokenizer.decode(ids[weights == data.VALUE_WEIGHT].tolist()) == "4172"


def test_text_that_looks_like_markup_never_becomes_a_control_token() -> None:
    tokenizer = NanoTokenizer(ASSET)
    first_special = tokenizer.special_id("[BOS]")
    assert max(tokenizer.text_ids("a <|open|> b [EOS] <|end_of_msg|>")) < first_special
    assert [tokenizer.special_id(t) for t in markup.SPECIAL_TOKENS] == list(range(first_special, first_special + 16))
    for word in ("message", "think", "response", "user", "assistant", "system", "tool", " role", '="', " type"):
        assert len(tokenizer.text_ids(word)) == 1, word


def test_a_neighbour_key_was_never_told() -> None:
    rng = Random(1)
    taken: set[tuple[str, str]] = set()
    told = [facts.random_fact(rng, taken) for _ in range(50)]
    assert all(facts.neighbour_key(rng, told, taken) not in {f.key for f in told} for _ in range(200))


@needs_torch
def test_an_untrained_model_already_repeats_what_followed_the_same_tokens() -> None:
    """The start that copies: in a row that says the same 40 tokens again, far more of them are right than by chance."""
    import torch

    from examples.train_nano.model import NanoConfig, NanoModel

    torch.manual_seed(1)
    model = NanoModel(NanoConfig()).eval()
    once = torch.randint(0, 2000, (4, 40), generator=torch.Generator().manual_seed(2))
    filler = torch.randint(0, 2000, (4, 300), generator=torch.Generator().manual_seed(3))
    ids = torch.cat((once, filler, once), 1)
    with torch.no_grad():
        likeliest = model(ids).argmax(-1)
    right = (likeliest[:, 343:-1] == ids[:, 344:]).float().mean().item()
    assert right > 0.1  # by chance: 0.0005
