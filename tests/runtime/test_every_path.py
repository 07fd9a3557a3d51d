"""A whole forward pass has the same bits on every SIMD path, and in two threads at once of a process just begun."""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from serai.checkpoints.snapshot import LatentType
from serai.runtime.bench.tiny import TINY_K3, TINY_MODELS, TinyModel, write_tiny_model
from serai.runtime.checks.stepping import Stepper
from serai.runtime.models.open_model import Precision, find_model, load_model
from serai.runtime.models.trunk import Trunk
from serai.runtime.state import StatePool
from tests.kernels.simd_paths import ROOT, on_every_path

TOKENS = np.random.default_rng(8).integers(0, 1000, 40).astype(np.int32)


def pass_bits(
    shape: TinyModel,
    precision: Precision,
    trunk: Trunk = Trunk.AS_STORED,
    seed: int = 0,
    latents: LatentType | None = None,
) -> str:
    """Everything a state holds after two calls of many rows and some single tokens, in buffers that held NaN."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder) / "m", shape)
        loaded = load_model(find_model(Path(folder) / "m"), precision, max_rows=40, trunk=trunk, latents=latents)
        stepper = Stepper(loaded, StatePool(loaded.layout, poison=True))
        bits = stepper.ended(stepper.run(np.roll(TOKENS, seed), (17, 19, 1, 1, 1, 1)))
        loaded.model.close()
    return bits.hex()


def bits() -> str:
    """All variants of a pass, for `on_every_path`."""
    variants = [
        pass_bits(shape, precision, trunk)
        for shape in TINY_MODELS.values()
        for precision in Precision
        for trunk in Trunk
    ]
    variants += [pass_bits(TINY_K3, precision, latents=LatentType.Q8) for precision in Precision]
    return " ".join(variants)


def test_a_whole_pass_has_the_same_bits_on_every_simd_path() -> None:
    """Both families, both precisions, the trunk as stored, in 8 and in 4 bits, and latents in 8 bits."""
    found = on_every_path(__name__, "bits")
    assert len(next(iter(found.values())).split()) == 14
    assert len(set(found.values())) == 1, found


def two_at_once() -> None:
    """Two threads take models from nothing to a state, at once; then each alone. Prints whether the bits are equal."""
    results: dict[int, str] = {}
    barrier = threading.Barrier(2)

    def one(seed: int) -> None:
        barrier.wait()
        results[seed] = pass_bits(TINY_K3, Precision.FAST, seed=seed)

    both = [threading.Thread(target=one, args=(seed,)) for seed in (0, 5)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    alone = {seed: pass_bits(TINY_K3, Precision.FAST, seed=seed) for seed in (0, 5)}
    print("equal" if results == alone and len(set(alone.values())) == 2 else f"{results} {alone}")


def test_two_threads_of_a_new_process_step_different_sessions_at_once() -> None:
    code = f"from {__name__} import two_at_once; two_at_once()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "equal"), run.stderr
