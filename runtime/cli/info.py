"""`serai info`: what this installation would run with."""

from serai.runtime.cli.options import Json
from serai.runtime.cli.output import bytes_text, pairs, reporting


def info(as_json: Json = False) -> None:
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
        from serai.runtime.memory.limits import default_budget

        here = machine()
        folder = cache_folder()
        compiled, declared = sum(1 for _ in folder.glob("*.nbi")), len(kernels())
        cache = {"folder": str(folder), "kernels": declared, "compiled": compiled, "warm": compiled >= declared}
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
        out.result(
            {"version": here["serai"], "machine": here, "kernel_cache": cache, "default_budget": budget},
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
        )
