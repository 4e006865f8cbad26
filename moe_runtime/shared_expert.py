"""The shared expert of a layer, which each rank computes for its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from moe_runtime.config import ActivationConfig, SharedExpertConfig, check_shared_limit
from moe_runtime.support.fixed_dtypes import FixedDtypes, copy_checked


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.relu(x).square()


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "relu2": _squared_relu,
}
"""The names of `ActivationConfig.function`."""


class SharedExpert(FixedDtypes):
    """An activation between bf16 linears, replicated on every rank: `down(silu(gate(x)) * up(x))`.

    It has the function of the layer's `activation` instead of silu, with alpha 1. Where that has no gate, it is
    `down(function(up(x)))`. With a limit, as in Step 3.5 and Ling 3.0, silu is at most that, and up is clamped to plus
    and minus that (`SharedExpertConfig`). A `gated` one, as in Qwen2-MoE, is multiplied by
    `sigmoid(x @ token_gate)`; DeepSeek-V3 has none. Operations and roundings are as in these models in bf16. They
    are torch's, so on GPUs the last bits of a token may depend on the number of tokens.

    Attributes:
        gate_proj: bf16 `[S, H]`, `S` being `config.intermediate_size`; None where the activation has no gate.
        up_proj: bf16 `[S, H]`.
        down_proj: bf16 `[H, S]`.
        token_gate: bf16 `[1, H]`; None where not `gated`.

    Raises:
        ValueError: a `config.limit` where the activation is not silu of a gate.
    """

    def __init__(
        self,
        hidden_size: int,
        config: SharedExpertConfig,
        device: torch.device | None = None,
        activation: ActivationConfig | None = None,
    ) -> None:
        super().__init__()
        inner = config.intermediate_size
        formula = ActivationConfig() if activation is None else activation
        check_shared_limit("limit", config.limit, formula)
        self._function, self._limit = _FUNCTIONS[formula.function], config.limit
        # Weights are loaded in place, which inference tensors allow in inference mode only.
        with torch.inference_mode(False):
            self.gate_proj = _random(inner, hidden_size, device) if formula.gated else None
            self.up_proj = _random(inner, hidden_size, device)
            self.down_proj = _random(hidden_size, inner, device)
            self.token_gate = _random(1, hidden_size, device) if config.gated else None

    def load(
        self,
        gate_proj: torch.Tensor | None,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        token_gate: torch.Tensor | None = None,
    ) -> None:
        """Copy the weights of a checkpoint, with the shapes above, rounded to bf16.

        Raises `ValueError` for a wrong shape, and for a gate that is missing or unexpected.
        """
        given = {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj, "token_gate": token_gate}
        copy_checked({name: (getattr(self, name), tensor) for name, tensor in given.items()})

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """bf16 `[T, H]` of bf16 `[T, H]`."""
        linear = nn.functional.linear
        with _without_autocast(x_TH.device.type):
            if self.gate_proj is None:
                inner_TS = self._function(linear(x_TH, self.up_proj))
            else:
                y_TS, up_TS = self._function(linear(x_TH, self.gate_proj)), linear(x_TH, self.up_proj)
                if self._limit is not None:
                    y_TS, up_TS = y_TS.clamp(max=self._limit), up_TS.clamp(-self._limit, self._limit)
                inner_TS = y_TS * up_TS
            y_TH = linear(inner_TS, self.down_proj)
            return y_TH if self.token_gate is None else torch.sigmoid(linear(x_TH, self.token_gate)) * y_TH


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Runs linears in the dtype of their weights, also inside `torch.autocast`. Nearly free outside of it."""
    # Autocast raises for meta tensors.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _random(rows: int, columns: int, device: torch.device | None) -> nn.Parameter:
    weight = torch.randn(rows, columns, dtype=torch.float32, device=device) * columns**-0.5
    return nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
