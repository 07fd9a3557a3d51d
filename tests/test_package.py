"""The package is what it says: every folder is listed, layers import downwards only, the README's example runs."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.shared import ROOT

PARTS = ("checkpoints", "kernels", "runtime")


def modules(part: str) -> list[Path]:
    return sorted((ROOT / part).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Names of the modules of ours that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name for name in found if name.split(".")[0] == "serai"}


def test_every_package_folder_is_listed_in_pyproject() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for part in PARTS for path in modules(part)}
    expected = {"serai." + ".".join(folder.parts): str(folder) for folder in folders}
    assert sorted(setup["packages"]) == sorted(expected)
    assert setup["package-dir"] == expected


@pytest.mark.parametrize("part", ["kernels", "checkpoints"])
def test_kernels_and_checkpoints_import_nothing_else_of_ours(part: str) -> None:
    for path in modules(part):
        foreign = {name for name in imports(path) if not name.startswith(f"serai.{part}") and name != "serai"}
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_the_kernels_folder_is_no_regular_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "at the repository root it would shadow another package"


def test_nothing_is_at_the_top_level_but_what_was_agreed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {name.split("/")[0] for name in tracked if not name.startswith(".")}
    folders = {"runtime", "kernels", "checkpoints", "tests", "examples"}
    assert top <= folders | {"pyproject.toml", "README.md", "LICENSE", "Makefile"}


def test_planning_needs_no_compiler() -> None:
    """`serai plan` and `--help` answer at once: neither numba nor the tokenizer library is imported."""
    code = (
        "import sys; from serai.runtime.memory.plan import plan_memory; import serai.runtime.cli.main; "
        "print(sorted({'numba', 'llvmlite', 'tokenizers'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_the_readme_example_runs_as_printed(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)[0]
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False
    )
    assert run.returncode == 0, run.stderr
    answer, point = run.stdout.strip().splitlines()
    assert answer
    assert re.fullmatch(r"[a-z2-7]{26}", point)
