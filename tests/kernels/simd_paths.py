"""Run one function of a test module in a fresh process under each SIMD path this CPU has."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from serai.kernels import cpu

ROOT = Path(__file__).resolve().parents[2]


def digest(*arrays: np.ndarray) -> str:
    """Hash of the arrays' bits, types and shapes."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def on_every_path(module: str, function: str) -> dict[str, str]:
    """What `module.function()` returns (a string) under each `SERAI_SIMD`, by path name. Fails if a process does."""
    code = f"from {module} import {function}; print({function}())"
    results = {}
    for path in cpu.available_paths():
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"SERAI_SIMD": path.value},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, f"{path.value}: {run.stderr}"
        results[path.value] = run.stdout.strip()
    return results
