"""`serai info`: what this installation would run with."""

import json
import os
import subprocess
import sys

from typer.testing import CliRunner

from serai.kernels import cpu
from serai.kernels.cache import build_id, cache_folder
from serai.kernels.threads import threads
from serai.runtime.cli.main import app

runner = CliRunner()


def test_it_tells_the_machine_the_kernels_and_the_memory() -> None:
    result = runner.invoke(app, ["info", "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    machine = values["machine"]
    assert machine["simd"] == cpu.chosen_path().value
    assert machine["simd"] in machine["simd_available"]
    assert (machine["build"], machine["threads"], machine["cores"]) == (build_id(), threads(), os.cpu_count())
    cache = values["kernel_cache"]
    assert cache["folder"] == str(cache_folder())
    assert cache["kernels"] > 20
    assert cache["compiled"] <= cache["kernels"], "tests keep kernels of their own in that folder"
    assert cache["warm"] == (cache["compiled"] == cache["kernels"])
    budget = values["default_budget"]
    assert budget["budget_bytes"] > 0
    assert budget["rooms"][budget["bound"]] == budget["budget_bytes"] + budget["reserve_bytes"]


def test_people_get_the_same_in_words() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0
    for part in ("SIMD path", "Kernel cache", "Default budget", cpu.chosen_path().value):
        assert part in result.stdout


def test_a_simd_path_that_is_none_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "serai.runtime", "info", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"SERAI_SIMD": "mmx"},
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["kind"] == "SimdPathUnavailable"
    assert done.stderr.startswith("serai: SERAI_SIMD='mmx' names no SIMD path")
