"""Memory that ends at a page without access: a read behind its last byte ends the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NO_ACCESS = 0
"""`PROT_NONE` of mprotect."""


@contextmanager
def at_the_end_of_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A contiguous copy of the CPU tensor, whose last byte is the last one that can be read."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    room = -(-raw.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    protect = (ctypes.c_void_p(whole.data_ptr() + room), ctypes.c_size_t(mmap.PAGESIZE))
    assert libc.mprotect(*protect, NO_ACCESS) == 0, ctypes.get_errno()
    copy = whole[room - raw.numel() : room]
    copy.copy_(raw)
    try:
        yield copy.view(tensor.dtype).view(tensor.shape)
    finally:
        assert libc.mprotect(*protect, mmap.PROT_READ | mmap.PROT_WRITE) == 0, ctypes.get_errno()
