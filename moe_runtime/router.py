"""Top-k routing in fp32. Equal logits give equal experts on every device; ties go to the lowest id.

(Sigmoid scores of two devices may differ in their last bit.) `moe_runtime.kernels.route` is the kernel for GPUs.

Shape letters: `T` tokens, `H` hidden size, `E` experts of the layer, `K` experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from moe_runtime.config import MAX_EXPERTS, RouterConfig
from moe_runtime.kernels.formats.number_formats import MAX_COLUMNS
from moe_runtime.kernels.runtime import resolve_engine
from moe_runtime.support.arguments import (
    check_device,
    check_flag,
    check_integer,
    check_is_tensor,
    check_kind,
    check_no_grad,
    check_number,
    describe,
)
from moe_runtime.support.fixed_dtypes import FixedDtypes, copy_checked


def softmax_topk(
    logits_TE: torch.Tensor, top_k: int, *, renormalize: bool = True, scaling_factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the `top_k` largest, as in Qwen3-MoE and Mixtral.

    The top-k is taken of the logits: softmax is monotone, but may round two of them to one value and create ties.
    A NaN logit counts as the largest and gives NaN weights; ids are still distinct and in range.

    Args:
        logits_TE: any float dtype; computed in fp32.
        renormalize: divide the top-k weights by their sum (`norm_topk_prob`).
        scaling_factor: multiplies the weights at the end.

    Returns:
        ids int32 `[T, K]` and weights fp32 `[T, K]`, by descending logit.
    """
    _check_arguments(logits_TE, top_k, scaling_factor)
    check_flag("renormalize", renormalize)
    logits_TE = logits_TE.float()
    idx_TK = _stable_topk(logits_TE, top_k)
    weights_TK = logits_TE.softmax(dim=-1).gather(1, idx_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return idx_TK.to(torch.int32), weights_TK * float(scaling_factor)


def topk_softmax(
    logits_TE: torch.Tensor, top_k: int, *, scaling_factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` largest logits, then softmax over these, as in gpt-oss.

    Equals `softmax_topk` with `renormalize` except for the last bits, since it divides only once.

    Args:
        logits_TE: any float dtype; computed in fp32. A NaN counts as the largest.
        scaling_factor: multiplies the weights at the end.

    Returns:
        ids int32 `[T, K]` and weights fp32 `[T, K]`, by descending logit, ties to the lowest id.
    """
    _check_arguments(logits_TE, top_k, scaling_factor)
    logits_TE = logits_TE.float()
    idx_TK = _stable_topk(logits_TE, top_k)
    return idx_TK.to(torch.int32), logits_TE.gather(1, idx_TK).softmax(dim=-1) * float(scaling_factor)


def sigmoid_topk(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    correction_bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores with correction bias and group limit, as in DeepSeek-V3.

    The score of an expert is `sigmoid(logit) + bias`, and that of each of `num_groups` equal groups is the sum of its
    two best experts. Only experts of the `top_groups` best groups are eligible. Weights are scores without bias,
    divided by their sum + 1e-20 (`renormalize`), times `scaling_factor`. Ties, also between groups, go to the lowest
    id. A NaN counts as the largest; ids are distinct and in range whatever the logits are.

    Args:
        logits_TE: any float dtype; scores are computed in fp64 and rounded to fp32, so that equal tokens get equal
            ones.
        correction_bias_E: fp32 `[E]` (`e_score_correction_bias`), or None for zeros.

    Returns:
        ids int32 `[T, K]` and weights fp32 `[T, K]`, by descending biased score.
    """
    _check_arguments(logits_TE, top_k, scaling_factor)
    check_flag("renormalize", renormalize)
    tokens, experts = logits_TE.shape
    _check_bias(correction_bias_E, logits_TE)
    check_integer("num_groups", num_groups)
    check_integer("top_groups", top_groups)
    if experts % num_groups or (num_groups > 1 and experts // num_groups < 2):
        raise ValueError(f"num_groups: expected groups of equal size, two experts at least, got {num_groups}")
    if top_groups > num_groups or top_k > top_groups * (experts // num_groups):
        raise ValueError(
            f"top_groups: expected 1..{num_groups} groups that together hold top_k = {top_k} experts, got {top_groups}"
        )
    # On CPUs an fp32 sigmoid has other last bits at the end of a tensor, where it is not vectorized.
    scores_TE = logits_TE.double().sigmoid().float()
    choice_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E.float()
    if top_groups < num_groups:
        best_two = choice_TE.view(tokens, num_groups, experts // num_groups).topk(2, dim=-1).values
        groups = _stable_topk(best_two.sum(dim=-1), top_groups)
        allowed = torch.zeros(tokens, num_groups, dtype=torch.bool, device=choice_TE.device).scatter_(1, groups, True)
        # A bias may be -inf. Scores of eligible groups must still come before masked ones.
        choice_TE = choice_TE.clamp(min=torch.finfo(torch.float32).min)
        choice_TE = choice_TE.masked_fill(~allowed.repeat_interleave(experts // num_groups, dim=1), float("-inf"))
    idx_TK = _stable_topk(choice_TE, top_k)
    weights_TK = scores_TE.gather(1, idx_TK)
    if renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return idx_TK.to(torch.int32), weights_TK * float(scaling_factor)


class Router(FixedDtypes):
    """Linear gate and top-k: `forward(x [T, H]) -> (topk_idx int32 [T, K], topk_weights fp32 [T, K])`.

    Args:
        engine: "triton" and "cuda" sum in fp32 in a Triton kernel, where it takes the tokens; "torch" in float64;
            "auto" is Triton on GPUs. A token's answer does not depend on its neighbours with either.

    Attributes:
        weight: fp32 `[E, H]`; a bf16 checkpoint fits in it exactly.
        bias: fp32 `[E]`, added to the logits, zeros until loaded; None where the config has no bias.
        e_score_correction_bias: fp32 buffer `[E]`, zeros until loaded; None where the config has no correction bias.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        config: RouterConfig,
        device: torch.device | None = None,
        *,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        for name, size, most in (
            ("hidden_size", hidden_size, MAX_COLUMNS),
            ("num_experts", num_experts, MAX_EXPERTS),
            ("top_k", top_k, num_experts),
        ):
            if check_integer(name, size) > most:
                raise ValueError(f"{name}: expected at most {most}, got {describe(size)}")
        check_kind("config", config, RouterConfig)
        resolve_engine(engine, torch.empty(0).device if device is None else check_device("device", device))
        self.engine = engine
        self.top_k = top_k
        self.config = config
        # Weights are loaded in place, which inference tensors allow in inference mode only.
        with torch.inference_mode(False):
            weight = torch.empty(num_experts, hidden_size, dtype=torch.float32, device=device)
            self.weight = nn.Parameter(weight.normal_(std=hidden_size**-0.5), requires_grad=False)
            zeros = torch.zeros(num_experts, dtype=torch.float32, device=device)
            self.bias = nn.Parameter(zeros, requires_grad=False) if config.bias else None
            self.e_score_correction_bias: torch.Tensor | None
            self.register_buffer("e_score_correction_bias", zeros.clone() if config.correction_bias else None)

    def load(
        self,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
    ) -> None:
        """Copy the router of a checkpoint: weight `[E, H]`, biases `[E]`, any float dtype that fits in fp32.

        Raises `ValueError` for a wrong shape, and for a bias that is missing or that the config does not have.
        """
        copy_checked(
            {
                "weight": (self.weight, weight),
                "bias": (self.bias, bias),
                "correction_bias": (self.e_score_correction_bias, correction_bias),
            }
        )

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """fp32 `[T, E]`. Raises `ValueError` for a wrong shape, an integer dtype, or an input that requires grad.

        Summed in float64 and rounded once: libraries choose the order of fp32 sums by the number of tokens, and a
        token's weights must not depend on the other tokens.
        """
        self._check(x_TH)
        with torch.no_grad():
            bias = None if self.bias is None else self.bias.double()
            return nn.functional.linear(x_TH.double(), self.weight.double(), bias).float()

    def _check(self, x_TH: torch.Tensor) -> None:
        if check_is_tensor("x", x_TH).device != self.weight.device:
            raise ValueError(f"x: expected device {self.weight.device}, as the router's weight, got {x_TH.device}")
        if x_TH.dim() != 2 or x_TH.shape[1] != self.weight.shape[1]:
            raise ValueError(f"x: expected [T, {self.weight.shape[1]}], got {list(x_TH.shape)}")
        if not x_TH.is_floating_point():
            raise ValueError(f"x: expected a float dtype, got {x_TH.dtype}")
        check_no_grad("x", x_TH)

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config, experts = self.config, self.weight.shape[0]
        self._check(x_TH)
        if resolve_engine(self.engine, x_TH.device) != "torch":
            from moe_runtime.kernels import route

            if route.supports(x_TH, experts, config):
                biases = {"bias_E": self.bias, "correction_bias_E": self.e_score_correction_bias}
                return route.route(x_TH, self.weight, self.top_k, config, **biases)
        logits_TE = self.logits(x_TH)
        if config.kind == "softmax":
            return softmax_topk(
                logits_TE, self.top_k, renormalize=config.renormalize, scaling_factor=config.scaling_factor
            )
        if config.kind == "topk_softmax":
            return topk_softmax(logits_TE, self.top_k, scaling_factor=config.scaling_factor)
        return sigmoid_topk(
            logits_TE,
            self.top_k,
            correction_bias_E=self.e_score_correction_bias,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            renormalize=config.renormalize,
            scaling_factor=config.scaling_factor,
        )

    if TYPE_CHECKING:  # that of nn.Module takes and gives Any
        __call__ = forward


def _stable_topk(values: torch.Tensor, k: int) -> torch.Tensor:
    """Ids int64 of the `k` largest of the last dimension, NaN first, ties to the lowest id (`topk` promises neither).

    >>> _stable_topk(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), 3).tolist()
    [[1, 2, 0]]
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _check_arguments(logits_TE: torch.Tensor, top_k: int, scaling_factor: float) -> None:
    if check_is_tensor("logits", logits_TE).dim() != 2 or not logits_TE.is_floating_point():
        raise ValueError(f"logits: expected a float tensor [T, E], got {logits_TE.dtype} {list(logits_TE.shape)}")
    if type(top_k) is not int or not 1 <= top_k <= logits_TE.shape[1]:
        raise ValueError(f"top_k: expected 1..{logits_TE.shape[1]}, got {describe(top_k)}")
    check_number("scaling_factor", scaling_factor, positive=True)


def _check_bias(bias_E: torch.Tensor | None, logits_TE: torch.Tensor) -> None:
    if bias_E is None:
        return
    expected = logits_TE.shape[1:], logits_TE.device
    check_is_tensor("correction_bias", bias_E)
    if (bias_E.shape, bias_E.device) != expected or not bias_E.is_floating_point():
        found = f"{bias_E.dtype} {list(bias_E.shape)} on {bias_E.device}"
        raise ValueError(f"correction_bias: expected a float tensor {list(expected[0])} on {expected[1]}, got {found}")
