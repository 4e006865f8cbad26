"""The processes of one peer, a rank each: they import beforehand, run when they are told to, and are ended in time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

RANK_PROGRAM = "moe_runtime.launch.research.peers.rank"
POLL_S = 0.05
LAST_LINES = 30
GRACE_S = 5.0
"""After one rank has failed, for the others to fail too and say why."""
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Unless they are set: without NVLink multicast some peers would wait for it for ever, and we use none."""


class Ranks:
    """Starts `world` processes, which wait for `run`.

    Args:
        arguments: of `rank.main`, without the folder.
        folder: for what they write: `rows.jsonl`, and by rank `error.RANK` and `log.RANK`.
    """

    def __init__(self, arguments: Sequence[str], world: int, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        self._processes = []
        for rank in range(world):
            of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = MULTICAST_OFF | kept | {name: str(value) for name, value in (of_rank | place).items()}
            with (folder / f"log.{rank}").open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", RANK_PROGRAM, *arguments, "--folder", str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # what a peer starts, such as a compiler, ends with it
                )
            self._processes.append(process)

    def run(self, limit_s: float) -> str:
        """Let them run; empty once all have ended well, else why they did not. Nothing of them is left."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(b"go\n")
                process.stdin.flush()
        end, failed_at = time.monotonic() + limit_s, None
        try:
            while True:
                codes = [process.poll() for process in self._processes]
                now = time.monotonic()
                if all(code == 0 for code in codes):
                    return ""
                if any(codes) and failed_at is None:
                    failed_at = now
                if None not in codes or (failed_at is not None and now > failed_at + GRACE_S):
                    return f"failed: {self._why(codes)}"
                if now > end:
                    said = self._errors()
                    return f"did not end within its limit of {limit_s:g} s{': ' if said else ''}{said}"
                time.sleep(POLL_S)
        finally:
            self.end()

    def end(self) -> None:
        """End what is left of them."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()

    def printed(self) -> str:
        """The last lines that each rank printed."""
        parts = []
        for rank in range(len(self._processes)):
            lines = (self.folder / f"log.{rank}").read_text(errors="replace").splitlines()[-LAST_LINES:]
            parts += [f"rank {rank}: {line}" for line in lines]
        return "\n".join(parts)

    def _errors(self) -> str:
        files = [self.folder / f"error.{rank}" for rank in range(len(self._processes))]
        said = [f"rank {rank}: {file.read_text()}" for rank, file in enumerate(files) if file.exists()]
        return "; ".join(said)

    def _why(self, codes: Sequence[int | None]) -> str:
        """What the ranks said, or else how the first that failed ended and the last line that it printed."""
        if said := self._errors():
            return said
        rank = next(rank for rank, code in enumerate(codes) if code)
        lines = (self.folder / f"log.{rank}").read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"rank {rank} ended with {codes[rank]}{': ' if last else ''}{last[:300]}"
