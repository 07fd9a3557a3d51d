"""A new file that appears whole or not at all, and never over another one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from serai.runtime.monitor.source import ActionRefused


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that gets its name when the block ends well; raises `ActionRefused` for a name that is taken
    or a folder that can't be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
        os.link(part, path)  # unlike a rename, fails where the name is taken
    except OSError as error:
        raise ActionRefused(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
