"""`serai info`: what this installation would run with."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from serai.runtime.cli.options import Json
from serai.runtime.cli.output import bytes_text, pairs, reporting, table

if TYPE_CHECKING:
    from serai.runtime.experts.disk_speed import DiskSpeed


def info(
    measure_io: Annotated[
        bool, typer.Option("--io", help="Measure the disk too: a 1 GiB file is written, read and removed; seconds.")
    ] = False,
    disk_folder: Annotated[
        Path, typer.Option("--dir", metavar="D", help="The folder whose disk --io measures. \\[default: this one]")
    ] = Path(),
    record: Annotated[
        str | None,
        typer.Option("--io-size", metavar="SIZE", help="Bytes of a random read. \\[default: 17.5 MB, an expert of K3]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the version, the machine, the compiled kernels and the memory there is to use."""
    with reporting(as_json=as_json) as out:
        # The model imports every kernel, so that the count of those still to be compiled is right.
        import serai.runtime.models.kimi  # noqa: F401
        from serai.kernels.cache import cache_folder
        from serai.kernels.compile import kernels
        from serai.kernels.cpu import available_paths
        from serai.kernels.threads import layer
        from serai.runtime.checks.machine import machine
        from serai.runtime.errors import BadParameter
        from serai.runtime.experts.disk_speed import K3_RECORD_BYTES, measure_disk
        from serai.runtime.memory.byte_sizes import parse_bytes
        from serai.runtime.memory.limits import default_budget

        here = machine()
        folder = cache_folder()
        # Benches and tests keep kernels of their own there; numba begins a file's name with the module and function.
        kept = {path.name.rpartition("-")[0] for path in folder.glob("*.nbi")}
        needed = [f"{one.function.__module__.rpartition('.')[2]}.{one.function.__qualname__}" for one in kernels()]
        compiled, declared = sum(name in kept for name in needed), len(needed)
        cache = {"folder": str(folder), "kernels": declared, "compiled": compiled, "warm": compiled == declared}
        budget: dict[str, object] | None
        try:
            found = default_budget()
        except BadParameter as error:
            budget, told = None, str(error)
        else:
            budget = {
                "budget_bytes": found.budget_bytes,
                "reserve_bytes": found.reserve_bytes,
                "bound": found.bound.name,
                "rooms": {room.name: room.free_bytes for room in found.rooms},
            }
            told = (
                f"{bytes_text(found.budget_bytes)}: {bytes_text(found.bound.free_bytes)} free by {found.bound.name}, "
                f"less {bytes_text(found.reserve_bytes)} kept out"
            )
        memory = here["memory_bytes"]
        disk = None
        if measure_io:
            record_bytes = K3_RECORD_BYTES if record is None else parse_bytes(record)
            disk = measure_disk(disk_folder, record_bytes=record_bytes, tell=out.note)
        out.result(
            {"version": here["serai"], "machine": here, "kernel_cache": cache, "default_budget": budget}
            | ({} if disk is None else {"io": disk.to_json()}),
            pairs(
                [
                    ("serai", f"{here['serai']} (build {here['build']})"),
                    ("Machine", f"{here['cpu']}, {here['cores']} cores, {here['system']}"),
                    ("Memory", bytes_text(memory) if isinstance(memory, int) else "unknown"),
                    ("SIMD path", f"{here['simd']} (this CPU has {', '.join(p.value for p in available_paths())})"),
                    ("Threads", f"{here['threads']} ({layer()})"),
                    ("Kernel cache", f"{folder}, {compiled} of {declared} compiled"),
                    ("Default budget", told),
                    ("Python", f"{here['python']}, numpy {here['numpy']}, numba {here['numba']}"),
                ]
            ),
            *([] if disk is None else _disk_tables(disk)),
        )


def _disk_tables(disk: "DiskSpeed") -> list[RenderableType]:
    served = {True: "the disk", False: "memory, so these are not a disk's figures", None: "the system doesn't say what"}
    rates = table(
        "reads in flight", f"in a row, {bytes_text(disk.block_bytes)}", f"random, {bytes_text(disk.record_bytes)}"
    )
    in_a_row, at_random = dict(disk.sequential), dict(disk.random.tried)
    for count in sorted(in_a_row | at_random):
        shown = (f"{one[count] / 1e9:.2f} GB/s" if count in one else "" for one in (in_a_row, at_random))
        rates.add_row(f"{count}", *shown)
    return [
        pairs(
            [
                ("Disk", f"of {disk.folder.resolve()}"),
                ("Reads", f"{disk.mode.value}, answered by {served[disk.reaches_disk]}"),
                ("Written", f"{bytes_text(disk.file_bytes)} at {disk.write_bytes_per_s / 1e9:.2f} GB/s"),
                ("Experts would be read", f"{disk.random.reads_in_flight} at a time"),
                ("Measured in", f"{disk.seconds:.1f} s"),
            ],
            title="\nThe disk",
        ),
        rates,
    ]
