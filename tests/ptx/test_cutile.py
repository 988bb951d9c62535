"""Kernels of cuTile: their binaries, what a driver does with one, and a launch, where it is installed."""

import ctypes
import platform
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tiebreak.backends.ptx import CARDS
from tiebreak.backends.ptx.cutile import kernel_of, section
from tiebreak.backends.ptx.driver import POINTER, Compiled, Driver
from tiebreak.backends.ptx.session import executing
from tiebreak.kernels.kernel import CannotRunError

MISSING = find_spec("cuda") is None or find_spec("cuda.tile") is None
MAKES = b"\0__CUDA_TILEIR_FUNC_ON_ARGUMENTS_CHANGE_0\0"
CODE = bytes.fromhex("90 c6413007 c3")  # nop; mov byte ptr [rcx + 48], 7; ret
KERNEL = """.visible .entry kernel(.param .u64 .ptr .global .align 1 into, .param .u32 more,
.hidden .param .align 64 .b8 hidden[8])
.reqntid 64
{
.reg .b32 %r<9>; .reg .b64 %rd<9>;
.shared .align 128 .b8 mine[256];
ld.param.b64 %rd0, [into]; ld.param.b32 %r0, [more]; ld.param.b32 %r1, [hidden];
mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 2; mov.b32 %r4, mine; add.s32 %r4, %r4, %r3; add.s32 %r5, %r0, %r1;
mov.u32 %r6, %clusterid.x; add.s32 %r5, %r5, %r6;
st.shared.b32 [%r4], %r5; ld.shared.b32 %r5, [%r4];
cvt.u64.u32 %rd1, %r3; add.s64 %rd0, %rd0, %rd1; st.global.b32 [%rd0], %r5; ret;
}
.nv_intermediate_source_section {
.code_block {
}
}
.section .debug_str { .b8 1 }
"""


def elf(sections: dict[bytes, bytes]) -> bytes:
    """A file of sections, the first of which has no name and the last all names."""
    names = b"\0" + b"".join(name + b"\0" for name in (*sections, b".names"))
    body, headers = bytes(64), struct.pack("<IIQQQQIIQQ", *[0] * 10)
    for name, content in ({**sections, b".names": names}).items():
        place = names.index(b"\0" + name + b"\0") + 1
        headers += struct.pack("<IIQQQQIIQQ", place, 1, 0, 0, len(body), len(content), 0, 0, 1, 0)
        body += content
    head = struct.pack("<QIHHHHHH", len(body), 0, 64, 0, 0, 64, len(sections) + 2, len(sections) + 1)
    return body[:40] + head + body[40 + len(head) :] + headers


def binary(text: str = KERNEL) -> bytes:
    """As tileiras writes them: host code is the second section's from its second byte on."""
    symbol = struct.pack("<IBBHQQ", 1, 0, 0, 2, 1, len(CODE) - 1)
    host = elf({b".strtab": MAKES, b".ltext": CODE, b".symtab": bytes(24) + symbol})
    info = bytes(8) + b"\4\12\10\0" + struct.pack("<IHH", 1, 0x210, 56)
    lines = {b".nv_debug_ptx_txt": text.replace("\n", "\0").encode()} if text else {}
    return elf({**lines, b".nv.info.kernel": info, b".nv.host": host})


def test_a_section_is_found_by_its_whole_name() -> None:
    made = elf({b".one": b"1", b".one.more": b"22", b".two": b"333"})
    assert [section(made, name) for name in (b".one", b".one.more", b".two", b".on")] == [b"1", b"22", b"333", b""]


def launched(kernel: Compiled) -> tuple[Driver, torch.Tensor]:
    """Two blocks of a kernel, of as many threads as it says."""
    driver, into, handle = Driver({}), torch.zeros(64, dtype=torch.int32), POINTER()
    driver.tensors.append(into)
    driver.keep(ctypes.addressof(handle), kernel)
    given = ctypes.c_uint64(into.data_ptr()), ctypes.c_uint32(1000)
    addresses = (POINTER * 2)(*map(ctypes.addressof, given))
    config = (ctypes.c_uint * 14)(2, 1, 1, 1, 1, 1)  # no stream, and no attributes
    failed = driver.launch("sm_80", ctypes.addressof(config), handle.value or 0, ctypes.addressof(addresses))
    assert bool(failed) == (driver.error is not None)
    return driver, into


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code for x86-64")
def test_a_kernel_has_what_its_host_code_adds_to_its_parameters() -> None:
    """They begin at the card's address 0x210, so that 12 bytes are followed by what is aligned to 64 after 48."""
    driver, into = launched(kernel_of("kernel", binary()))
    assert driver.error is None
    assert into.tolist() == [1008] * 64  # the later block's


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (KERNEL, "", "without its PTX"),
        (".reqntid 64", ".reqntid 64\n.reqnctapercluster 2", "in clusters of blocks"),
        (".shared", ".shared .b8 other[4]; .shared", "several variables in shared memory"),
    ],
)
def test_what_a_binary_needs_beyond_is_refused(old: str, new: str, message: str) -> None:
    driver, into = launched(kernel_of("kernel", binary(KERNEL.replace(old, new))))
    assert isinstance(driver.error, CannotRunError)
    assert message in str(driver.error)
    assert not into.any()


@pytest.fixture(scope="module")
def tiles(module_at: Callable[[Path], Any]) -> Any:
    if MISSING:
        pytest.skip("cuTile is not installed: pip install cuda-tile nvidia-cuda-tileiras nvidia-nvvm nvidia-cuda-nvcc")
    return module_at(Path(__file__).with_name("few_tiles.py"))


@pytest.mark.parametrize(
    ("card", "rows"), [("sm_80", 64), ("sm_90", 64), ("sm_100", 64), ("sm_100", 16), ("sm_120", 64)]
)
def test_a_kernel_of_tiles_is_attention(card: str, rows: int, tiles: Any) -> None:
    """With a last tile of keys that is not full, whose boxes are partly beyond the tensor."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, n, 64), generator=generator).bfloat16() for n in (80, 200, 200))
    with executing(card, CARDS[card]):
        o = tiles.attention(q, k, v, rows=rows)
    exact = (q.double() @ k.double().mT / 8).softmax(-1) @ v.double()
    assert (o.double() - exact).abs().max() < 2**-8 * exact.abs().max()


def test_what_cutile_does_not_compile_or_is_not_executed_is_refused(tiles: Any) -> None:
    q = torch.zeros((1, 1, 64, 64), dtype=torch.bfloat16)
    with executing("sm_75", CARDS["sm_75"]), pytest.raises(CannotRunError, match="not compiled for sm_75"):
        tiles.attention(q, q, q)
    with executing("sm_90", CARDS["sm_90"]), pytest.raises(CannotRunError, match="in clusters of blocks"):
        tiles.attention(q, q, q, launched=tiles.in_clusters)
