"""The peers by name: what each needs, what it was written for, and which of our rows stand beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec

from moe_runtime.launch.research.peers import (
    deep_ep_buffer,
    deep_gemm_experts,
    flashinfer_layer,
    humming_experts,
    ours,
    torch_layer_peer,
)
from moe_runtime.launch.research.peers.case import Case, Point

OURS = "moe_runtime"


@dataclass(frozen=True)
class Peer:
    """What can be timed.

    Attributes:
        prepare: makes what does not depend on the number of tokens.
        operation: of its rows where it gave none.
        beside: the entry of ours for the same operation.
        modules: top-level modules that it imports.
        package: distribution that has its version; None for what is always there.
        written_for: version of the package.
        install: how to get it.
        fewest, most: tokens a rank that it is timed with, where there is a limit.
        implementation: name in the rows; its own where empty.
        own_transport: whether the ranks reach each other through moe_runtime.
    """

    prepare: Callable[[Case], Point]
    operation: str
    beside: str | None = None
    modules: tuple[str, ...] = ()
    package: str | None = None
    written_for: str = ""
    install: str = ""
    fewest: int = 1
    most: int | None = None
    implementation: str = ""
    own_transport: bool = False

    def times(self, tokens: int) -> bool:
        """Whether it is timed with so many tokens."""
        return self.fewest <= tokens and (self.most is None or tokens <= self.most)

    def limits(self) -> str:
        """Numbers of tokens that it is timed with."""
        return f"{self.fewest} tokens or more" if self.most is None else f"{self.fewest} to {self.most} tokens"

    def missing(self) -> str:
        """What is not installed of it; empty where all is there."""
        absent = [name for name in self.modules if find_spec(name) is None]
        return f"not installed: {', '.join(absent)} ({self.install})" if absent else ""

    def version(self) -> str | None:
        """The installed version; None where there is none."""
        if self.package is None:
            return None
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


MOST_LOW_LATENCY, FEWEST_NORMAL = 512, 512
"""Tokens a rank: what each mode of DeepEP is for."""

_FLASHINFER = partial(
    Peer,
    operation="layer",
    beside="ours",
    package="flashinfer-python",
    written_for="0.7.4",
    install="pip install flashinfer-python==0.7.4 nvidia-cutlass-dsl",
)
_DEEP_EP = partial(
    Peer,
    modules=("deep_ep",),
    package="deep_ep",
    written_for="dd758ca",
    install="build github.com/deepseek-ai/DeepEP at dd758ca, then the same command times it",
)

PEERS: dict[str, Peer] = {
    "flashinfer_push": _FLASHINFER(flashinfer_layer.push, modules=("flashinfer",)),
    "flashinfer_pull": _FLASHINFER(flashinfer_layer.pull, modules=("flashinfer", "cutlass")),
    "flashinfer_nvfp4": _FLASHINFER(flashinfer_layer.nvfp4, modules=("flashinfer", "cutlass")),
    "deepep_low_latency": _DEEP_EP(
        deep_ep_buffer.low_latency, operation="low latency", beside="ours_low_latency", most=MOST_LOW_LATENCY
    ),
    "deepep_normal": _DEEP_EP(
        deep_ep_buffer.normal, operation="normal dispatch", beside="ours_normal", fewest=FEWEST_NORMAL
    ),
    "deep_gemm": Peer(
        deep_gemm_experts.experts,
        operation="experts",
        beside="ours_experts_fp8",
        modules=("deep_gemm",),
        package="deep_gemm",
        written_for="2.6.1",
        install="build github.com/deepseek-ai/DeepGEMM at 54e2261 (2.6.1)",
    ),
    "humming": Peer(
        humming_experts.experts,
        operation="experts",
        beside="ours_experts_mxfp4",
        modules=("humming",),
        package="humming-kernels",
        written_for="0.1.19",
        install="pip install humming-kernels==0.1.19",
    ),
    "torch": Peer(torch_layer_peer.layers, operation="layer", beside="ours"),
}
"""What `--peers` takes."""

_OURS = partial(Peer, implementation=OURS, own_transport=True)

BESIDE: dict[str, Peer] = {
    "ours": _OURS(ours.layers, operation="layer"),
    "ours_low_latency": _OURS(ours.low_latency, operation="low latency", most=MOST_LOW_LATENCY),
    "ours_normal": _OURS(ours.normal, operation="normal dispatch", fewest=FEWEST_NORMAL),
    "ours_experts_fp8": _OURS(partial(ours.experts, name="fp8"), operation="experts"),
    "ours_experts_mxfp4": _OURS(partial(ours.experts, name="mxfp4"), operation="experts"),
}
"""Our rows, which come with those that stand beside them."""

ALL = BESIDE | PEERS


def with_ours(names: list[str]) -> list[str]:
    """The names in order, each after ours for the same operation."""
    found: dict[str, None] = {}
    for name in names:
        beside = PEERS[name].beside
        found |= dict.fromkeys([*([] if beside is None else [beside]), name])
    return list(found)
