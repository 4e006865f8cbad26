"""The experts of one rank: gate and up, an activation with requantization, down; rows of a group in, rows of it out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch

from moe_runtime.config import ActivationConfig, MoELayerConfig
from moe_runtime.kernels.exchange.geometry import ExchangeGeometry
from moe_runtime.kernels.formats.number_formats import TokenFormat, format_named, token_formats_for, weight_format_named
from moe_runtime.kernels.gemm.arguments import check_activation, check_formats, encode_scale
from moe_runtime.kernels.gemm.dequant_layout import DEQUANT_FORMATS, UNIT, unit_columns
from moe_runtime.kernels.gemm.expanded_weights import ExpandedWeights, StoredWeights, expanded_activation
from moe_runtime.kernels.gemm.expert_norm import ExpertNorm, expert_norm
from moe_runtime.kernels.gemm.grouped_gemm import BoundExperts, bind_experts, grouped_gemm, grouped_gemm_swiglu
from moe_runtime.kernels.gemm.grouped_rows import GroupedRows
from moe_runtime.kernels.gemm.plan import GemmPlan, GemmProblem, holds_tokens, plan_gemm
from moe_runtime.kernels.gemm.prepacked import MAX_PREPACKED_EXPERTS, RESULT_FORMATS, PrepackedWeights
from moe_runtime.kernels.gemm.weights import SILU, Activation, ActivationFunction, ExpertWeights, GateUpOrder
from moe_runtime.kernels.runtime import Engine, resolve_engine
from moe_runtime.observation.phases import phase
from moe_runtime.support.arguments import check_device, check_kind, describe


def activation_of(config: ActivationConfig) -> Activation:
    """The formula that a config describes."""
    fields = config.model_dump() | {
        "order": GateUpOrder(config.order),
        "function": ActivationFunction(config.function),
    }
    return Activation(**fields)


@dataclass(frozen=True)
class Experts:
    """`down @ act(gate_up @ x)` of each row, by the expert of its group.

    Nothing waits for the host, with one exception: where the engine is not `cuda`, prepacked and expanded weights are
    restored in each call, and that waits for the host.

    Attributes:
        gate_up: weights `[E, 2I, H]` of gate and up, or `[E, I, H]` of up where the activation has no gate.
        down: weights `[E, H, I]`.
        activation: formula, and the order of gate and up.
        intermediate_format: format between the GEMMs; None means that of `down`, bf16 with `mxfp4` weights.
            `nvfp4` weights also take bf16 and `fp8_block`, `mxfp4` weights mxfp8 and `fp8_block`; Hopper's kernels make
            no `fp8_block` result of these weights, so Triton's makes it.
        intermediate_gsf: encode scale of an `nvfp4` intermediate, a number or one fp32 element on the device of the
            weights; None means `kernels.gemm.arguments.DEFAULT_INTERMEDIATE_GSF`. Kept as a tensor.
        norm: a norm over each row of the result, which is then bf16; None for none.
        engine: "auto", "cuda", "triton" or "torch".
        num_sms: most SMs that Hopper's GEMMs take, for experts that run at the same time as other kernels; None means
            all. Blocks of FP8 and bf16 GEMMs come in clusters of two: give 8 less than the others leave, one for each
            GPC (what that saves: `kernels/gemm/notes.md`).

    Raises:
        ValueError: weights that do not belong together; the message names the argument.
    """

    gate_up: StoredWeights
    down: StoredWeights
    activation: Activation = SILU
    intermediate_format: str | TokenFormat | None = None
    intermediate_gsf: float | torch.Tensor | None = None
    engine: str = "auto"
    num_sms: int | None = None
    norm: ExpertNorm | None = None
    _bound: dict[tuple[object, ...], BoundExperts | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up, self.down
        check_kind("gate_up", gate_up, (ExpertWeights, PrepackedWeights, ExpandedWeights))
        check_kind("down", down, (ExpertWeights, PrepackedWeights, ExpandedWeights))
        check_kind("activation", self.activation, Activation)
        if self.num_sms is not None and (type(self.num_sms) is not int or not 1 <= self.num_sms < 2**31):
            raise ValueError(f"num_sms: expected at least 1 or None, got {describe(self.num_sms)}")
        check_activation(gate_up, self.activation, "gate_up")
        if not isinstance(down, ExpertWeights) and down.gate_up is not None:
            raise ValueError("down: expected plain prepacked weights, got some of gate and up")
        if down.num_experts != gate_up.num_experts:
            raise ValueError(f"down: expected {gate_up.num_experts} experts as in gate_up, got {down.num_experts}")
        inner = gate_up.num_rows // self.activation.num_parts
        if down.num_columns != inner:
            raise ValueError(f"down: expected K = I = {inner}, got {down.num_columns}")
        if down.num_rows != gate_up.num_columns:
            raise ValueError(f"down: expected N = H = {gate_up.num_columns}, got {down.num_rows}")
        if down.device != gate_up.device:
            raise ValueError(f"down: expected device {gate_up.device} as gate_up, got {down.device}")
        if self.norm is not None:
            check_kind("norm", self.norm, ExpertNorm)
            if self.norm.scale.shape != (down.num_rows,) or self.norm.scale.device != down.device:
                found = f"{list(self.norm.scale.shape)} on {self.norm.scale.device}"
                raise ValueError(f"norm: expected a scale [{down.num_rows}] on {down.device}, got {found}")
        usual = token_formats_for(down.format.name)[0]
        asked = usual if self.intermediate_format is None else self.intermediate_format
        fmt = format_named(asked, "intermediate_format")
        fmt.check_columns(down.num_columns, "I of gate_up")
        check_formats(fmt, down.format, "intermediate_format")
        object.__setattr__(self, "intermediate_format", fmt)
        resolve_engine(self.engine, down.device)
        gsf = encode_scale(fmt, self.intermediate_gsf, down.device, "intermediate_gsf")
        object.__setattr__(self, "intermediate_gsf", gsf)

    def __getstate__(self) -> dict[str, object]:
        """Without what belongs to this process and to these tensors."""
        return {**self.__dict__, "_bound": {}}

    @property
    def num_experts(self) -> int:
        """`E`."""
        return self.gate_up.num_experts

    @property
    def reads_scales_in_record(self) -> bool:
        """Whether the block scales of rows may lie as the rows do (`GroupedRows.scales_in_record`)."""
        return isinstance(self.gate_up, PrepackedWeights) and resolve_engine(self.engine, self.gate_up.device) == "cuda"

    def prepacked(self) -> Experts:
        """The same experts with weights in the order that the GPU's kernels read, where that is another.

        Raises `ValueError` as `PrepackedWeights.prepack` does. Waits for the device.
        """
        gate_up, down = self.gate_up, self.down
        assert isinstance(self.intermediate_format, TokenFormat)
        if self._wanted(gate_up) and self.intermediate_format.name in RESULT_FORMATS:
            gate_up = PrepackedWeights.prepack(replace(gate_up, gate_up=self.activation.gate_up))
        if self._wanted(down) and (down.expert_scales is None or down.expert_scales.ndim == 1):
            down = PrepackedWeights.prepack(replace(down, gate_up=None))
        return replace(self, gate_up=gate_up, down=down)

    def _wanted(self, w: StoredWeights) -> TypeGuard[ExpertWeights]:
        return isinstance(w, ExpertWeights) and PrepackedWeights.wanted(w, self.engine)

    def to(self, device: torch.device | str) -> Experts:
        """The same experts on `device`."""
        device = check_device("device", device)
        gsf = self.intermediate_gsf
        return replace(
            self,
            gate_up=self.gate_up.to(device),
            down=self.down.to(device),
            intermediate_gsf=gsf.to(device) if isinstance(gsf, torch.Tensor) else gsf,
            norm=None if self.norm is None else self.norm.to(device),
        )

    def __call__(self, rows: GroupedRows, out: torch.Tensor | None = None) -> torch.Tensor:
        """Expert outputs by row position.

        Args:
            rows: `H` numbers each, in a format that goes with `gate_up`.
            out: bf16, fp16 or fp32 `[>= capacity, H]`, with a norm bf16; a new bf16 one when None.

        Returns:
            The output; rows that no active group owns are not written.
        """
        assert self.intermediate_format is not None
        if self.norm is not None and isinstance(out, torch.Tensor) and out.dtype != torch.bfloat16:
            raise ValueError(f"out: expected torch.bfloat16 with a norm, got {out.dtype}")
        with phase("gate_up"):
            hidden = grouped_gemm_swiglu(
                rows,
                self.gate_up,
                self.activation,
                out_format=self.intermediate_format,
                out_gsf=self.intermediate_gsf,
                then=self.down,
                engine=self.engine,
                num_sms=self.num_sms,
            )
        with phase("down"):
            out = grouped_gemm(hidden, self.down, out=out, engine=self.engine, num_sms=self.num_sms)
        self._normalize(out, rows)
        return out

    def _run(self, rows: GroupedRows, out: torch.Tensor) -> None:
        """`__call__` of the rows of a dispatcher into the memory that combine takes them from.

        Where Hopper's kernels run, the first step of each size binds what does not change, and later ones check nothing
        again: `rows` must be as the dispatcher made them, and `out` contiguous memory of torch.
        """
        active = rows.num_active_experts
        key = (
            rows.format.name,
            rows.capacity,
            rows.expected_rows,
            active if isinstance(active, int) else None,
            rows.expert_ids.shape,
            rows.rows.shape,
            rows.rows.stride(),
            rows.row_index is None,
            rows.scales_in_record,
            out.dtype,
            out.stride(),
        )
        if key not in self._bound:
            self._bound[key] = self._bind(rows, out)
        bound = self._bound[key]
        if bound is None:
            self(rows, out)
            return
        with phase("gate_up"):
            hidden = bound.multiply_first(rows)
        with phase("down"):
            bound.multiply_second(hidden, out)
        if self.norm is not None:
            self._normalize(out, rows)

    def _bind(self, rows: GroupedRows, out: torch.Tensor) -> BoundExperts | None:
        assert isinstance(self.intermediate_format, TokenFormat) and not isinstance(self.intermediate_gsf, float)
        return bind_experts(
            rows,
            self.gate_up,
            self.down,
            self.activation,
            out,
            between=self.intermediate_format,
            gsf=self.intermediate_gsf,
            engine=self.engine,
            num_sms=self.num_sms,
        )

    def _normalize(self, out: torch.Tensor, rows: GroupedRows) -> None:
        if self.norm is not None:
            with phase("post_expert_norm"):
                expert_norm(out, rows, self.num_experts, self.norm, engine=self.engine)


def expanded_experts(gate_up: ExpertWeights, down: ExpertWeights, activation: Activation, **more: Any) -> Experts:
    """Experts whose `nvfp4` or `mxfp4` weights are multiplied in FP8 (`ExpandedWeights`); `more` are attributes.

    Hopper's kernels expand them in each step. For other engines they are expanded here, once.

    Raises `ValueError` as `ExpandedWeights.prepack` and `Experts`. Waits for the device.
    """
    first = ExpandedWeights.prepack(replace(gate_up, gate_up=activation.gate_up))
    second = ExpandedWeights.prepack(replace(down, gate_up=None))
    if resolve_engine(more.get("engine", "auto"), down.device) == "cuda":
        return Experts(first, second, activation, **more)
    return Experts(first.expand(), second.expand(), expanded_activation(activation), **more)


def plan_experts(
    config: MoELayerConfig, geometry: ExchangeGeometry, engine: Engine, capability: tuple[int, int] | None, sms: int
) -> tuple[GemmPlan, GemmPlan]:
    """The plans of gate/up and down for the rows that a layer expects, as `Experts` would make them.

    `engine` is a resolved one, `sms` counts the SMs of the GPU of that `capability`.
    """
    weights, tokens = weight_format_named(config.weight_format), format_named(config.token_format)
    between = format_named(config.intermediate_format)
    prepacks = engine == "cuda" and weights in DEQUANT_FORMATS and geometry.num_local_experts <= MAX_PREPACKED_EXPERTS
    hidden, inner, experts = config.hidden_size, config.intermediate_size, geometry.num_local_experts
    activation = activation_of(config.activation)
    expanded = None
    if config.multiplied_format != config.weight_format:
        # Other engines have them in this format.
        prepacks, expanded = False, weights if engine == "cuda" else None
        weights = weight_format_named(config.multiplied_format)
    gate_up = GemmProblem(
        engine,
        capability,
        sms,
        weight_format=weights,
        token_format=tokens,
        experts=experts,
        n=activation.num_parts * inner,
        k=hidden,
        rows=geometry.expected_rows,
        capacity=geometry.row_capacity,
        groups=experts,
        active_groups=experts,
        out_format=between,
        gated=activation.gated,
        prepacked=prepacks and between.name in RESULT_FORMATS,
        gathered=not geometry.contiguous,
        expanded_from=expanded,
    )
    first = plan_gemm(gate_up)
    dequantized = gate_up.prepacked and unit_columns(inner) * UNIT == inner
    by_rows = dequantized and first.dequant is not None and holds_tokens(inner, weights, first.dequant.shape)
    down = gate_up._replace(
        token_format=between,
        n=hidden,
        k=inner,
        out_format=None,
        prepacked=prepacks,
        gathered=False,
        dequantized=dequantized,
        dequantized_rows=by_rows,
    )
    return first, plan_gemm(down)
