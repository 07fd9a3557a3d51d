"""`serai plan`: exact bytes from a bare config.json or a folder, and a refusal of what can't fit."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serai.runtime.bench.tiny import TINY_LINEAR, write_tiny_model
from serai.runtime.cli.main import app

DATA = Path(__file__).resolve().parents[2] / "data"
K3 = DATA / "kimi-k3-config.json"
runner = CliRunner()


def plan_json(*arguments: str) -> dict[str, object]:
    result = runner.invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert isinstance(values, dict)
    return values


def test_a_bare_config_gives_exact_integers_for_every_part_of_a_session() -> None:
    values = plan_json(str(K3), "--context", "1000")
    assert values["kda_bytes"] == 69 * 96 * 128 * 128 * 4
    assert values["conv_bytes"] == 69 * 3 * 3 * 12288 * 4
    of_token = {"float32": 24 * 576 * 4, "bfloat16": 24 * 576 * 2, "q8": 24 * (576 + 8)}
    assert values["latent_token_bytes"] == of_token
    assert values["latent_bytes"] == {kind: 1000 * size for kind, size in of_token.items()}
    assert values["source"] == "config"


def test_more_sessions_need_their_held_state_more() -> None:
    one, five = plan_json(str(K3)), plan_json(str(K3), "--sessions", "5")
    held = one["hot_session_bytes"]
    for latents in ("float32", "bfloat16", "q8"):
        more = five["sessions_needed_bytes"][latents] - one["sessions_needed_bytes"][latents]  # type: ignore[index]
        assert more == 4 * held[latents]  # type: ignore[index]


def test_a_folder_with_weights_is_planned_from_their_headers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TINY_LINEAR)
    assert plan_json(str(tmp_path))["source"] == "headers"
    (tmp_path / "model.safetensors").unlink()
    assert plan_json(str(tmp_path))["source"] == "config"


def test_sessions_that_fit_follow_from_the_budget(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TINY_LINEAR)
    floor = plan_json(str(tmp_path))["floor_bytes"]
    held = plan_json(str(tmp_path))["hot_session_bytes"]
    budget = floor["bfloat16"] + 3 * held["bfloat16"]  # type: ignore[index]
    values = plan_json(str(tmp_path), "--budget", str(budget), "--sessions", "4")
    assert values["sessions_that_fit"]["bfloat16"] == 4  # type: ignore[index]
    assert values["fits"] is True
    assert plan_json(str(tmp_path), "--budget", str(budget), "--sessions", "5")["fits"] is False


def test_a_budget_under_the_floor_is_refused_in_one_sentence() -> None:
    result = runner.invoke(app, ["plan", str(K3), "--budget", "2GiB", "--json"])
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "BudgetTooSmall"
    assert "2,147,483,648 bytes" in error["message"]
    assert result.stderr == f"serai: {error['message']}\n"


def test_the_latents_of_exact_precision_need_more(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TINY_LINEAR)
    floor = plan_json(str(tmp_path))["floor_bytes"]
    budget = str(floor["bfloat16"])  # type: ignore[index]
    assert runner.invoke(app, ["plan", str(tmp_path), "--budget", budget]).exit_code == 0
    refused = runner.invoke(app, ["plan", str(tmp_path), "--budget", budget, "--precision", "exact"])
    assert refused.exit_code == 1
    assert 'latents="bfloat16"' in refused.stderr


def test_other_latents_are_planned_when_asked_for(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TINY_LINEAR)
    floor = plan_json(str(tmp_path))["floor_bytes"]
    budget = str(floor["q8"])  # type: ignore[index]
    values = plan_json(str(tmp_path), "--budget", budget, "--latents", "q8")
    assert (values["latents"], values["fits"]) == ("q8", True)
    refused = runner.invoke(app, ["plan", str(tmp_path), "--budget", budget])
    assert 'latents="q8"' in refused.stderr
    assert plan_json(str(tmp_path), "--precision", "exact")["latents"] == "float32"


@pytest.mark.parametrize("command", ["plan", "selfcheck"])
def test_latents_there_are_not_are_refused(command: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TINY_LINEAR)
    result = runner.invoke(app, [command, str(tmp_path), "--latents", "q2"])
    assert result.exit_code == 1
    assert "latents is one of 'float32', 'bfloat16', 'q8'" in result.stderr


def test_a_quantised_trunk_is_planned_smaller(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TINY_LINEAR)
    stored, small = plan_json(str(tmp_path)), plan_json(str(tmp_path), "--trunk", "q8")
    smallest = plan_json(str(tmp_path), "--trunk", "q4")
    assert (stored["trunk"], small["trunk"], smallest["trunk"]) == ("as stored", "q8", "q4")
    assert smallest["trunk_bytes"] < small["trunk_bytes"] < stored["trunk_bytes"]  # type: ignore[operator]
    exact = plan_json(str(tmp_path), "--trunk", "q8", "--precision", "exact")
    assert exact["scratch_bytes"] == stored["scratch_bytes"] < small["scratch_bytes"]  # type: ignore[operator]


@pytest.mark.parametrize("command", ["plan", "selfcheck"])
def test_a_trunk_there_is_not_is_refused(command: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TINY_LINEAR)
    result = runner.invoke(app, [command, str(tmp_path), "--trunk", "q2"])
    assert result.exit_code == 1
    assert "trunk is 'q8', 'q4', or left out" in result.stderr


def test_people_get_tables() -> None:
    result = runner.invoke(app, ["plan", str(K3), "--sessions", "2"])
    assert result.exit_code == 0
    for part in ("KDA state (69 layers)", "434 MB", "Convolution tails", "Latents (24 layers)", "2 sessions at once"):
        assert part in result.stdout


@pytest.mark.parametrize(
    ("path", "kind"), [("/no/such/model", "ModelNotFound"), (str(DATA / "make_small_tokenizer.py"), "ConfigInvalid")]
)
def test_what_is_no_model_is_named(path: str, kind: str) -> None:
    result = runner.invoke(app, ["plan", path, "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["kind"] == kind
