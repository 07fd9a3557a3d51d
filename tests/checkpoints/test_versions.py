"""Stores written by every format version there ever was are read; they lie in data/ and are never written again."""

import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from serai.checkpoints import Storage, Store
from serai.checkpoints.files.codec import Codec
from serai.checkpoints.files.manifest import StoredAs
from serai.checkpoints.format import FORMAT_VERSION
from serai.checkpoints.upkeep.fsck import fsck, rebuild
from tests.checkpoints import make_version_1, make_version_2
from tests.checkpoints.samples import same_bits


def copied(folder: Path, target: Path) -> Path:
    """A copy as private as a store must be: version control keeps no modes."""
    shutil.copytree(folder, target)
    target.chmod(0o700)
    for name in ("nodes", "manifests", "parts", "tags", "tmp"):
        (target / name).mkdir(exist_ok=True)
    return target


@pytest.mark.parametrize("made", [make_version_1, make_version_2], ids=["1", "2"])
def test_a_version_is_read(made: ModuleType, tmp_path: Path) -> None:
    """B58: the previous supported version loads from a kept fixture: all codecs, number types and documents of it."""
    folder = copied(made.FOLDER, tmp_path / "s")
    assert rebuild(str(folder)).clean
    with Store.open(str(folder)) as store:
        assert fsck(store).clean
        parent = None
        codecs = set()
        for number, (tokens, _, storage) in enumerate(made.STEPS, start=1):
            expected = make_version_1.node(number, tokens, parent)
            found = store.node(expected.id)
            for name in type(expected).__dataclass_fields__:
                assert np.array_equal(getattr(found, name), getattr(expected, name)), name
            info = store.snapshot_info(expected.id)
            assert info.storage == storage
            assert info.is_exact_for(made.FINGERPRINT) is not (storage.lossy or expected.inexact)
            loaded = store.load(expected.id, made.FINGERPRINT)
            if storage.lossy:
                assert np.array_equal(loaded.kda, made.state(expected.position).kda)
                assert np.array_equal(loaded.conv, made.state(expected.position).conv)
            else:
                assert same_bits(loaded, made.state(expected.position))
            heads = [store._files.head(name) for name in store._manifest(expected.id).parts]
            codecs |= {Codec(head.codec) for head in heads if head is not None}
            parent = expected
        assert parent is not None
        assert store.resolve("release") == parent.id
        assert codecs == made.CODECS


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_every_version_has_its_files(version: int) -> None:
    assert (make_version_1.FOLDER.parent / f"version-{version}" / "store").is_file()


def test_latents_of_8_bits_are_not_stored_with_loss_whatever_is_asked_for(tmp_path: Path) -> None:
    """They are kept as they are, and a state that counted as inexact was never begun from again."""
    with Store.open(str(tmp_path)) as store:
        node = make_version_1.node(1, 5, None)
        store.record(node)
        asked = Storage(latents=StoredAs.BFLOAT16)
        store.save(node.id, make_version_2.state(5), make_version_2.FINGERPRINT, reason="test", storage=asked)
        assert not store.snapshot_info(node.id).storage.lossy
