"""The cases of `kernel_bench gemm`: sizes, formats, how rows fall on groups, and what each case should reach.

A case is one GEMM of the reference model (H = 7168, I = 2048), or both with SwiGLU and requantization between, of
the experts of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from moe_runtime.kernels.formats.number_formats import (
    FORMATS,
    FP8_BLOCK,
    TokenFormat,
    ceil_div,
    intermediate_format_for,
    weight_format_named,
)
from moe_runtime.kernels.gemm.grouped_gemm import gemm_bytes, gemm_flops
from moe_runtime.launch.benchmarks.checks import format_bytes
from moe_runtime.launch.common.draws import routing
from moe_runtime.launch.kernel_bench.ceilings import BF16_TFLOP_PER_S, FP8_TFLOP_PER_S, MEMORY_TB_PER_S

RANKS, TOP_K = 8, 8
"""Of the layer that `uniform` and `layer` routing belong to."""

ROUTINGS = ("even", "half", "zipf", "empty", "uniform", "layer")
"""`half`: one group has half of all rows. `zipf`: group `g` has a part of `1 / (g + 1)`. `empty`: every other group
has none. `uniform`: tokens of 8 ranks choose 8 experts at random. `layer`: the same as a layer hands it on, rows found
through an index and capacity for the worst case."""
RANDOM_ROUTINGS = ("uniform", "layer")


@dataclass(frozen=True)
class Goal:
    """What a case should reach: one value.

    Attributes:
        kind: `us` (at most), `tflop_per_s` (at least), `floor_share` (at least), `of_case` (at most this many times
            the time of the case `other`), `of_peer` (at most this many times the time of the peer `other`).
        value: the number.
        other: name of a case or peer.
    """

    kind: str
    value: float
    other: str = ""

    @property
    def text(self) -> str:
        """As tables show it."""
        number = f"{self.value:g}"
        if self.kind == "of_case":
            return f"within {number} x `{self.other}`"
        if self.kind == "of_peer":
            return f"faster than {self.other}" if self.value == 1 else f"within {number} x {self.other}"
        return {
            "us": f"{number} us",
            "tflop_per_s": f"{number} TFLOP/s",
            "floor_share": f"{self.value:.0%} of the floor",
        }[self.kind]


@dataclass(frozen=True)
class Product:
    """One grouped GEMM of a case: `[rows, k]` times `[groups, n, k]`, results of `out_bytes` bytes per row."""

    name: str
    n: int
    k: int
    out_bytes: int


@dataclass(frozen=True)
class GemmCase:
    """One line of the benchmark.

    Attributes:
        name: unique; what `--cases` selects by.
        format: of rows and what lies between the GEMMs, and of weights but for `weights`.
        groups: experts, one group each.
        rows: rows of a group, on average.
        product: `gate_up` (a plain GEMM with the `[2I, H]` weight), `down` (`[H, I]`) or `both` with SwiGLU between.
        routing: one of `ROUTINGS`.
        goals: what it should reach; none for a case that others are compared with.
        hidden, intermediate: `H` and `I`.
        weights: format of the weights; None for the rows' format.
        expanded: whether the weights, in FP4, are multiplied in the rows' format as `ExpandedWeights`.
        brief: whether timing takes little time: torch's GEMMs are not timed beside it, and its parts only with pauses.
    """

    name: str
    format: str
    groups: int
    rows: int
    product: str
    routing: str = "even"
    goals: tuple[Goal, ...] = ()
    hidden: int = 7168
    intermediate: int = 2048
    weights: str | None = None
    expanded: bool = False
    brief: bool = False

    @property
    def token_format(self) -> TokenFormat:
        return FORMATS[self.format]

    @property
    def weight_format(self) -> TokenFormat:
        """In which the weights are stored."""
        return weight_format_named(self.weights or self.format)

    @property
    def multiplied_format(self) -> TokenFormat:
        """As which the weights are multiplied."""
        return FP8_BLOCK if self.expanded else self.weight_format

    @property
    def products(self) -> tuple[Product, ...]:
        """In the order of their computation."""
        between = format_bytes(intermediate_format_for(self.token_format, self.multiplied_format), self.intermediate)
        plain = {"gate_up": 2 * 2 * self.intermediate, "both": between}
        found = []
        if self.product != "down":
            found.append(Product("gate_up", 2 * self.intermediate, self.hidden, plain[self.product]))
        if self.product != "gate_up":
            found.append(Product("down", self.hidden, self.intermediate, 2 * self.hidden))
        return tuple(found)

    def group_rows(self, seed: int) -> tuple[int, ...]:
        """Rows of each group."""
        total = self.groups * self.rows
        if self.routing in RANDOM_ROUTINGS:
            ids = self.routed(seed)
            return tuple(torch.bincount(ids[ids < self.groups].flatten().long(), minlength=self.groups).tolist())
        if self.routing == "half":
            return shares(total, [self.groups - 1, *[1] * (self.groups - 1)])
        if self.routing == "zipf":
            return shares(total, [1 / (group + 1) for group in range(self.groups)])
        if self.routing == "empty":
            return shares(total, [(group + 1) % 2 for group in range(self.groups)])
        return (self.rows,) * self.groups

    def routed(self, seed: int) -> torch.Tensor:
        """int32 `[tokens of all ranks, TOP_K]`: experts of all ranks; those below `groups` are this rank's."""
        return _routed(seed, self.groups * self.rows // TOP_K, RANKS * self.groups)

    def floors_us(self, sizes: Sequence[int]) -> list[tuple[float, str]]:
        """`(microseconds, "memory" or "compute")` of each GEMM: least time by bytes or by operations."""
        ceiling = FP8_TFLOP_PER_S if self.multiplied_format == FP8_BLOCK else BF16_TFLOP_PER_S
        floors = []
        for product in self.products:
            memory = self.moved_bytes(product, sizes) / MEMORY_TB_PER_S * 1e-6
            compute = gemm_flops(sum(sizes), product.n, product.k) / ceiling * 1e-6
            floors.append((memory, "memory") if memory >= compute else (compute, "compute"))
        return floors

    def moved_bytes(self, product: Product, sizes: Sequence[int]) -> int:
        """Least bytes of a GEMM: rows, weights of groups that have rows, results, each once."""
        return gemm_bytes(
            sum(sizes),
            product.n,
            product.k,
            a_format=self.token_format,
            w_format=self.weight_format,
            active_experts=sum(size > 0 for size in sizes),
            out_bytes_per_row=product.out_bytes,
        )

    def flops(self, sizes: Sequence[int]) -> int:
        """Operations of all GEMMs."""
        return sum(gemm_flops(sum(sizes), product.n, product.k) for product in self.products)

    def small(self) -> GemmCase:
        """The same case in a size for CPUs and memory checkers, without goals."""
        groups = min(self.groups, 4)
        # With random routing each rank has a token at least.
        rows = max(min(self.rows, 8), ceil_div(TOP_K, groups) if self.routing in RANDOM_ROUTINGS else 1)
        return replace(self, groups=groups, rows=rows, goals=(), hidden=256, intermediate=128)


@cache
def _routed(seed: int, tokens: int, experts: int) -> torch.Tensor:
    """Experts of `tokens` tokens of each rank. Cases that are compared have the same."""
    return torch.cat([routing("uniform", seed, rank, 0, tokens, experts, TOP_K)[0] for rank in range(RANKS)])


def shares(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` split in proportion to `weights`; what rounding down leaves goes to the largest fractions, then first."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    sizes = [int(part) for part in exact]
    order = sorted(range(len(sizes)), key=lambda index: (sizes[index] - exact[index], index))
    for index in order[: total - sum(sizes)]:
        sizes[index] += 1
    return tuple(sizes)


BF16_PEER = "torch grouped_mm bf16"
FP8_PEER = "torch scaled_grouped_mm fp8 rowwise"


def _each(name: str, fmt: str, groups: int, rows: int, goals: tuple[Goal, Goal]) -> list[GemmCase]:
    """The two GEMMs, each by itself."""
    return [
        GemmCase(f"{name} {product}", fmt, groups, rows, product, goals=(goal,))
        for product, goal in zip(("gate_up", "down"), goals, strict=True)
    ]


def _skewed(fmt: str) -> list[GemmCase]:
    even = f"{fmt} 32x1024 both"
    goals = (Goal("of_peer", 1.0, BF16_PEER),) if fmt == "nvfp4" else ()
    skewed = [
        GemmCase(f"{even}, {kind}", fmt, 32, 1024, "both", kind, (Goal("of_case", 1.1, even),))
        for kind in ("half", "zipf", "empty")
    ]
    return [GemmCase(even, fmt, 32, 1024, "both", goals=goals), *skewed]


def _decode(fmt: str, gate_up_us: float, down_us: float) -> list[GemmCase]:
    goals = (Goal("us", gate_up_us), Goal("us", down_us))
    return [case for rows in (16, 32, 48) for case in _each(f"{fmt} 8x{rows}", fmt, 8, rows, goals)]


EXPANDED_ROWS = (1, 4, 8, 16, 24, 64, 128, 256, 512, 1024, 2048)


def _expanded() -> list[GemmCase]:
    """FP4 weights that are expanded to e4m3, and FP8 weights with the same rows; each weights' cases in a row."""
    found = []
    for weights in ("nvfp4", "mxfp4", "fp8_block"):
        for rows, kind in (*((rows, "uniform") for rows in EXPANDED_ROWS), (1024, "even")):
            name = f"32x{rows} both, {kind}"
            case = GemmCase(f"fp8_block {name}, beside expanded", "fp8_block", 32, rows, "both", kind, brief=True)
            if weights != "fp8_block":
                goals = (Goal("of_case", 1.08, case.name),) if kind == "even" else ()
                name = f"{weights} {name}, expanded"
                case = replace(case, name=name, weights=weights, expanded=True, goals=goals)
            found.append(case)
    return found


CASES: tuple[GemmCase, ...] = (
    *_decode("nvfp4", 40, 22),
    *(
        GemmCase(f"nvfp4 32x{rows} both", "nvfp4", 32, rows, "both", goals=(Goal("us", 230), Goal("floor_share", 0.8)))
        for rows in (1, 4, 16, 32)
    ),
    GemmCase("nvfp4 T=128 both", "nvfp4", 32, 32, "both", "uniform", (Goal("us", 240),)),
    GemmCase("nvfp4 T=128 both, as a layer hands it on", "nvfp4", 32, 32, "both", "layer", (Goal("us", 240),)),
    *_skewed("nvfp4"),
    *_decode("fp8_block", 62, 35),
    GemmCase("fp8_block 32x32 both", "fp8_block", 32, 32, "both", goals=(Goal("us", 360),)),
    *(
        case
        for groups, rows in ((8, 4096), (4, 8192))
        for case in _each(
            f"fp8_block {groups}x{rows}",
            "fp8_block",
            groups,
            rows,
            (Goal("tflop_per_s", 1430), Goal("tflop_per_s", 1350)),
        )
    ),
    *_skewed("fp8_block"),
    *_each(
        "mxfp8 8x4096",
        "mxfp8",
        8,
        4096,
        (Goal("of_case", 1.0, "bf16 8x4096 gate_up"), Goal("of_case", 1.0, "bf16 8x4096 down")),
    ),
    *_skewed("mxfp8"),
    *_each("bf16 8x4096", "bf16", 8, 4096, (Goal("tflop_per_s", 800), Goal("tflop_per_s", 800))),
    *_skewed("bf16"),
    *_expanded(),
)
