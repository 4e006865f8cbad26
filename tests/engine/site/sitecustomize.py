"""Ask Linux for AMX, in every process: vLLM's CPU attention uses it without, and dies of an illegal instruction."""

import ctypes
import platform

if platform.system() == "Linux" and platform.machine() == "x86_64":
    ARCH_PRCTL, REQUEST_XCOMP_PERM, TILE_DATA = 158, 0x1023, 18
    ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_XCOMP_PERM, TILE_DATA)
