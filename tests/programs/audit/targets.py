"""The GPUs that kernels are compiled for."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A GPU architecture, as Triton names it."""

    name: str  # how tables and --targets call it
    backend: str  # Triton's compiler for it: cuda, hip
    arch: int | str  # its number (cuda) or name (hip)
    warp_size: int  # threads that run in step
    cards: str  # what a user would buy

    @property
    def assembly(self) -> str:
        """Triton's name of the assembly's text."""
        return {"cuda": "ptx", "hip": "amdgcn"}[self.backend]


def _cuda(capability: int, cards: str) -> Target:
    return Target(f"sm_{capability}", "cuda", capability, 32, cards)


def _hip(name: str, cards: str) -> Target:
    return Target(name, "hip", name, 64, cards)


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        _cuda(80, "A100"),
        _cuda(89, "L4, L40S, RTX 4090"),
        _cuda(90, "H100, H200"),
        _cuda(100, "B200"),
        _cuda(120, "RTX 5090"),
        _hip("gfx942", "MI300"),
        _hip("gfx950", "MI350"),
    )
}
