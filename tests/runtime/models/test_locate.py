"""Where a model's name leads, with the Hugging Face cache's own rules."""

from pathlib import Path

import pytest

from serai.runtime.errors import ModelNotFound
from serai.runtime.models import locate
from serai.runtime.models.locate import hub_cache, locate_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def cached(hub: Path, *, commit: str = COMMIT, reference: str | None = COMMIT) -> Path:
    repository = hub / "models--org--some-model"
    if reference is not None:
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(reference)
    return model(repository / "snapshots" / commit)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    assert locate_model(folder) == folder
    assert locate_model(str(folder)) == folder
    with pytest.raises(ModelNotFound, match=r"the model folder '.*' has no config\.json \(looked for "):
        locate_model(tmp_path)


def test_nano_is_the_built_in_model_even_beside_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_in = model(tmp_path / "package" / "nano")
    monkeypatch.setitem(locate.BUILT_IN, "nano", built_in)
    beside = model(tmp_path / "nano")
    monkeypatch.chdir(tmp_path)
    assert locate_model("nano") == built_in
    assert locate_model("./nano").resolve() == beside
    assert locate_model(Path("nano")).resolve() == beside


def test_the_built_in_folder_is_in_the_package() -> None:
    assert locate.BUILT_IN["nano"].parts[-3:] == ("runtime", "assets", "nano")


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate_model("~/m") == folder
    with pytest.raises(ModelNotFound, match="the home folder in '~nobody-of-that-name/m' is unknown"):
        locate_model("~nobody-of-that-name/m")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"HF_HUB_CACHE": "", "HF_HOME": "~/b", "HOME": "/h"}, "/h/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_environment_says(environ: dict[str, str], expected: str) -> None:
    assert hub_cache(environ) == Path(expected)


def test_a_cached_model_is_the_snapshot_that_main_names(tmp_path: Path) -> None:
    other = "f" * 40
    cached(tmp_path, commit=other, reference=None)
    folder = cached(tmp_path)
    assert locate_model("org/some-model", {"HF_HUB_CACHE": str(tmp_path)}) == folder


def test_a_single_snapshot_needs_no_reference(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    folder = cached(tmp_path, reference=None)
    assert locate_model("org/some-model", environ) == folder
    cached(tmp_path, commit="f" * 40, reference=None)
    with pytest.raises(ModelNotFound, match=r"has no .*refs/main and 2 snapshots; give the path of the one you mean"):
        locate_model("org/some-model", environ)


@pytest.mark.parametrize("reference", ["../../outside", "a/b", "", "..", "\xff"])
def test_a_reference_is_never_followed_out_of_the_cache(tmp_path: Path, reference: str) -> None:
    model(tmp_path / "outside")
    cached(tmp_path, reference=reference)
    cached(tmp_path, commit="f" * 40, reference=None)
    with pytest.raises(ModelNotFound):
        locate_model("org/some-model", {"HF_HUB_CACHE": str(tmp_path)})


def test_a_reference_to_a_missing_snapshot_says_so(tmp_path: Path) -> None:
    cached(tmp_path, reference="f" * 40)
    with pytest.raises(ModelNotFound, match=r"refs/main points to .*ffff, which is missing"):
        locate_model("org/some-model", {"HF_HUB_CACHE": str(tmp_path)})


def test_what_is_nowhere_is_refused_with_where_it_was_looked_for(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    sentence = (
        rf"no model 'org/gone': it is not 'nano', there is no folder org/gone, and .* no {tmp_path}/models--org--gone"
    )
    with pytest.raises(ModelNotFound, match=sentence):
        locate_model("org/gone", environ)
    for name in ("gone", "a/b/c", "../x/y", "a..b/c", "org/na me", "org\0/x"):
        with pytest.raises(ModelNotFound, match="is named ORG/NAME"):
            locate_model(name, environ)
