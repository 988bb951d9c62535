"""The instruction-set levels of one CPU, each a separate platform.

Two environment variables, both read once as a process starts, change the bits of PyTorch's CPU results:
ATEN_CPU_CAPABILITY chooses the vector code of ATen's own kernels (SDPA's flash attention among them), and
ONEDNN_MAX_CPU_ISA limits what oneDNN does with a matrix product in bf16. A process therefore has one level, and a
comparison of levels takes one process for each.

Seen on an AMD Zen 4 (AVX512 with bf16, no AMX; torch 2.13.0+cpu) with the same inputs, batched products of (64, K) and
(K, 64), heads of width 64. Letters tell bits apart within a column; all 3 x 7 settings were tried:

| ATen \\ oneDNN            | bf16 matmul, K = 128 | bf16 matmul, K = 2048 | flash, 128 keys | exp(0) - 1 in flash |
|---|---|---|---|---|
| avx512, bf16 and up       | a | a | a | -5.34e-5 |
| avx512, AVX512_CORE       | a | b | a | -5.34e-5 |
| avx512, AVX2              | b | c | a | -5.34e-5 |
| avx2, bf16 and up         | a | a | b | -5.34e-5 |
| avx2, AVX512_CORE         | a | b | b | -5.34e-5 |
| avx2, AVX2                | b | c | b | -5.34e-5 |
| default, bf16 and up      | a | a | c | 0 |
| default, AVX512_CORE      | a | b | c | 0 |
| default, AVX2             | b | c | c | 0 |

"bf16 and up" is AVX512_CORE_BF16, _FP16, _AMX and no limit: alike on this CPU. So are AVX2 and AVX2_VNNI_2. With fp32
inputs exp(0) is 1 at every level. torch.randn's bits at `default` differ from those at the other two.

`LEVELS` has one level for each of the six sets of the columns K = 128, flash and exp(0) together, and takes the
AVX512_CORE member of a set where that adds the third set of bits at K = 2,048. The level with AMX switched off is there
for CPUs that have it; it was not measured.
"""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

#: The processor that QEMU plays. It reads this itself, and so do the processes that the first one starts.
PROCESSOR = "QEMU_CPU"
#: In which format oneDNN may multiply numbers of fp32: BF16, as guides to Graviton have it set. The former name.
FPMATH = "DNNL_DEFAULT_FPMATH_MODE"
#: The variables that decide the level. oneDNN still reads what begins with DNNL, its former name.
VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", FPMATH, PROCESSOR),
)

_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AMX = _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}


@dataclass(frozen=True)
class Level:
    """One instruction-set level."""

    name: str  #: what the command line, the records and their files call it
    environment: Mapping[str, str] = field(hash=False)  #: the variables that put a process on it; the others are unset
    needs: frozenset[str] = frozenset()  #: CPU features without which it can't run, or is the same as another level


def _level(name: str, aten: str, onednn: str, needs: frozenset[str]) -> Level:
    return Level(name, {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}, needs)


#: From the highest down; the first is the untouched environment. See the top of this module for the choice.
LEVELS = (
    Level("native", {}),
    _level("aten-avx512-onednn-bf16", "avx512", "AVX512_CORE_BF16", _AMX),
    _level("aten-avx512-onednn-avx2", "avx512", "AVX2", _AVX512),
    _level("aten-avx2-onednn-avx512", "avx2", "AVX512_CORE", _AVX512),
    _level("aten-avx2-onednn-avx2", "avx2", "AVX2", _AVX512),
    _level("aten-default-onednn-avx512", "default", "AVX512_CORE", _AVX512),
    _level("aten-default-onednn-avx2", "default", "AVX2", _AVX2),
)

_BF16_IN_FP32 = {FPMATH: "BF16"}
#: Emulated processors by architecture, each a level. Of those that QEMU 7.2 knows, these differ in the instructions by
#: which PyTorch and its libraries choose. Other settings change no bit there: see docs/platforms.md.
EMULATED: Mapping[str, tuple[Level, ...]] = {
    "aarch64": tuple(
        Level(f"aarch64-{name}", {PROCESSOR: processor, **settings})
        for name, processor, settings in (
            ("max", "max", {}),  # all that QEMU has: bf16, SVE and SVE2 of 512 bits
            ("max-fpmath-bf16", "max", _BF16_IN_FP32),  # as that one, and some products of fp32 in bf16
            ("max-sve256", "max,sve-max-vq=2", {}),  # SVE of 256 bits, for which ATen has separate code
            ("max-sve256-aten-default", "max,sve-max-vq=2", {"ATEN_CPU_CAPABILITY": "default"}),  # without that code
            ("max-sve128", "max,sve-max-vq=1", {}),  # SVE of 128 bits, as in Graviton 4 and Grace
            ("a64fx", "a64fx", {}),  # SVE of 512 bits, no bf16
            ("neoverse-n1", "neoverse-n1", {}),  # no SVE, no bf16: Graviton 2, Ampere's Altra
            ("cortex-a72", "cortex-a72", {}),  # Armv8.0: no fp16 arithmetic either
        )
    )
}


def supported(features: Collection[str]) -> tuple[Level, ...]:
    """Return the levels of a CPU with these features, by Linux's names, highest first; `native` alone if not x86."""
    return tuple(level for level in LEVELS if level.needs.issubset(features))


def current(environment: Mapping[str, str]) -> str:
    """Return the level of a process started in this environment; "custom" if it is none of `LEVELS`."""
    chosen = {name: environment[name] for name in VARIABLES if environment.get(name)}
    levels = itertools.chain(LEVELS, *EMULATED.values())
    return next((level.name for level in levels if level.environment == chosen), "custom")
