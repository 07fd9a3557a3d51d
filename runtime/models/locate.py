"""From the name a user gives to the folder of a model: no network, nothing but looking.

The Hugging Face cache is read by its own rules: `HF_HUB_CACHE`, else `HF_HOME/hub`, else
`XDG_CACHE_HOME/huggingface/hub`, else `~/.cache/huggingface/hub`; in it `models--ORG--NAME/refs/main` holds the commit
whose files are in `snapshots/COMMIT/`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from serai.runtime.errors import ModelNotFound

BUILT_IN = {"nano": Path(__file__).resolve().parent.parent / "assets" / "nano"}
"""Models inside the package, by the name that opens them."""

_REPOSITORY = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*", re.ASCII)


def locate_model(name: str | Path, environ: Mapping[str, str] | None = None) -> Path:
    """The folder of a model: "nano", a folder that exists, or `org/name` from the local Hugging Face cache.

    A string that names both is taken as the built-in model first, then as a folder. Raises `ModelNotFound`, saying
    what was looked for.
    """
    if isinstance(name, str) and name in BUILT_IN:
        return _with_config(BUILT_IN[name], f"the built-in model {name!r}")
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(f"the home folder in {str(name)!r} is unknown ({error})") from None
    if folder.is_dir():
        return _with_config(folder, f"the model folder {str(folder)!r}")
    if isinstance(name, str) and _REPOSITORY.fullmatch(name):
        return _from_cache(name, os.environ if environ is None else environ)
    raise ModelNotFound(
        f"there is no model {str(name)!r}: it is not {_built_in_names()}, there is no such folder, and a model of "
        "the Hugging Face cache is named ORG/NAME"
    )


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Where the Hugging Face cache is, whether it exists or not."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return _expanded(environ[variable], environ)
    if environ.get("HF_HOME"):
        return _expanded(environ["HF_HOME"], environ) / "hub"
    base = _expanded(environ.get("XDG_CACHE_HOME") or "~/.cache", environ)
    return base / "huggingface" / "hub"


def _from_cache(name: str, environ: Mapping[str, str]) -> Path:
    repository = hub_cache(environ) / f"models--{name.replace('/', '--')}"
    if not repository.is_dir():
        raise ModelNotFound(
            f"there is no model {name!r}: it is not {_built_in_names()}, there is no folder {name}, and the Hugging "
            f"Face cache has no {repository}; download it first, or give the path of its folder"
        )
    reference = repository / "refs" / "main"
    try:
        commit = reference.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        commit = _only_snapshot(name, repository)
    if not _COMMIT.fullmatch(commit):
        raise ModelNotFound(f"{reference} holds {commit[:80]!r}, which is not the name of a snapshot")
    folder = repository / "snapshots" / commit
    if not folder.is_dir():
        raise ModelNotFound(f"{reference} points to {folder}, which is missing; download {name} again")
    return _with_config(folder, f"the cached model {name!r}")


def _only_snapshot(name: str, repository: Path) -> str:
    """A download by commit leaves no refs/main; with one snapshot there is no doubt which is meant."""
    try:
        commits = sorted(path.name for path in (repository / "snapshots").iterdir() if path.is_dir())
    except OSError:
        commits = []
    if len(commits) == 1:
        return commits[0]
    raise ModelNotFound(
        f"the cached model {name!r} has no {repository / 'refs' / 'main'} and {len(commits)} snapshots; "
        "give the path of the one you mean"
    )


def _with_config(folder: Path, what: str) -> Path:
    if (folder / "config.json").is_file():
        return folder
    raise ModelNotFound(f"{what} has no config.json (looked for {folder / 'config.json'})")


def _built_in_names() -> str:
    return " or ".join(repr(name) for name in BUILT_IN)


def _expanded(path: str, environ: Mapping[str, str]) -> Path:
    """`~` through the same environment the rest is read from."""
    if path == "~" or path.startswith("~/"):
        home = environ.get("HOME")
        return Path(home or Path.home()) / path[2:]
    return Path(path)
