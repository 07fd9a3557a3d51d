"""The example that makes a model on the spot."""

import subprocess
import sys
from pathlib import Path

import pytest

from serai.runtime.models.config import load_config
from tests.shared import ROOT


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
def test_it_writes_a_model_of_the_family_and_says_how_large(family: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / "make_tiny_model.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "m"), "--family", family],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert load_config(tmp_path / "m").family.value == family
    assert f"a {family} model with" in done.stdout
