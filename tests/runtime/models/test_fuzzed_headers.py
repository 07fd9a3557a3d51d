"""Whatever bytes a shard holds, opening it either works or raises `WeightsInvalid`, and allocates little."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serai.runtime.errors import WeightsInvalid
from serai.runtime.models.safetensors_files import CheckpointFiles

SETTINGS = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

odd_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=6,
)
sizes = st.integers(0, 9) | st.sampled_from([2**31, 2**62, 2**64, 10**30])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F64", "BOOL", "Q7", "f32"]) | odd_values,
        "shape": st.lists(sizes, max_size=3) | odd_values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | odd_values,
    }
)
headers = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "é", ""]), entries | odd_values, max_size=4)


def open_it(folder: Path, content: bytes) -> CheckpointFiles | None:
    (folder / "model.safetensors").write_bytes(content)
    tracemalloc.start()
    try:
        return CheckpointFiles.open(folder)
    except WeightsInvalid:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2_000_000 + 200 * len(content)


def read_all(files: CheckpointFiles | None, content: bytes) -> None:
    if files is None:
        return
    with files:
        start = 8 + struct.unpack("<Q", content[:8])[0]
        assert start + sum(info.nbytes for info in files.tensors.values()) == len(content)
        for name, info in files.tensors.items():
            assert files.read(name).tobytes() == content[info.offset : info.offset + info.nbytes]


@SETTINGS
@given(content=st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    read_all(open_it(tmp_path, content), content)


@SETTINGS
@given(length=st.integers(0, 2**64 - 1) | st.integers(0, 120), rest=st.binary(max_size=100))
def test_any_length_field(tmp_path: Path, length: int, rest: bytes) -> None:
    content = struct.pack("<Q", length) + rest
    read_all(open_it(tmp_path, content), content)


@SETTINGS
@given(header=headers, data=st.integers(0, 80))
def test_any_header_of_the_right_form(tmp_path: Path, header: dict[str, Any], data: int) -> None:
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(data)
    read_all(open_it(tmp_path, content), content)


@SETTINGS
@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5), order=st.randoms())
def test_every_well_formed_file_is_read(tmp_path: Path, shapes: list[list[int]], order: Any) -> None:
    header, end = [], 0
    for index, shape in enumerate(shapes):
        nbytes = 2
        for size in shape:
            nbytes *= size
        header.append((f"t{index}", {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}))
        end += nbytes
    order.shuffle(header)
    text = json.dumps(dict(header)).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(range(256)) * (end // 256) + bytes(range(end % 256))
    files = open_it(tmp_path, content)
    assert files is not None
    read_all(files, content)


WHOLE_HEADER = json.dumps(
    {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    }
).encode()
WHOLE = struct.pack("<Q", len(WHOLE_HEADER)) + WHOLE_HEADER + bytes(24)


@SETTINGS
@given(at=st.integers(0, len(WHOLE) - 1), byte=st.integers(0, 255))
def test_one_damaged_byte(tmp_path: Path, at: int, byte: int) -> None:
    content = WHOLE[:at] + bytes((byte,)) + WHOLE[at + 1 :]
    read_all(open_it(tmp_path, content), content)
