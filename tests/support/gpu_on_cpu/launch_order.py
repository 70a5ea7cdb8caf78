"""Finds launches that touch the same memory of a slab in no defined order.

MLX knows of a kernel what it takes and what it gives. Two of which one writes what the other
touches are in order only if the later one takes something that the earlier one gave, or that
came of it.
"""

from collections.abc import Sequence

from tests.support.gpu_on_cpu.emulated import Launch
from tests.support.gpu_on_cpu.launch import Buffer


def unordered(launches: Sequence[Launch]) -> list[str]:
    """Each pair of launches that MLX might run at the same time but must not."""
    given: dict[int, int] = {}
    before: list[set[int]] = []
    faults = []
    for number, launch in enumerate(launches):
        direct = {given[id(array)] for array in launch.inputs if id(array) in given}
        before.append(direct.union(*(before[earlier] for earlier in direct)))
        given |= {id(array): number for array in launch.outputs}
        faults += [
            f"{launches[earlier].name} ({earlier}) and {launch.name} ({number})"
            for earlier in range(number)
            if earlier not in before[number] and _conflict(launches[earlier], launch)
        ]
    return faults


def _conflict(one: Launch, other: Launch) -> bool:
    slabs = {slab.contents.ctypes.data: slab for slab in one.slabs}
    pairs = [(slabs.get(slab.contents.ctypes.data), slab) for slab in other.slabs]
    return any(_overlap(first, second) for first, second in pairs if first is not None)


def _overlap(one: Buffer, other: Buffer) -> bool:
    touched = one.read | one.written, other.read | other.written
    return bool((one.written & touched[1]).any() or (touched[0] & other.written).any())
