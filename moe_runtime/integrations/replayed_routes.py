"""A forward pass of a transformers model that takes given experts in place of those that its routers choose.

RL trainers replay the routes of inference so (R3). The router still runs: without given weights, `torch.topk` answers
with the given ids while the MoE block runs, so that the router's own formula gives their weights, and autograd its
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.context.peers import abort_peers_on_error
from moe_runtime.context.threads import is_capturing
from moe_runtime.integrations.expert_modules import describe_experts
from moe_runtime.integrations.transformers_models import MoEBlock, model_config_of, with_experts
from moe_runtime.support.arguments import check_is_tensor, check_kind, check_lies_on

ID_DTYPES = (torch.int16, torch.int32, torch.int64)

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
"""What experts are called with."""

_REPLAYED: WeakSet[nn.Module] = WeakSet()
"""Blocks that take given routes now."""


@dataclass(frozen=True)
class RoutedBlock:
    """A MoE block whose experts are to be given.

    Attributes:
        name: for messages.
        module: the block, which has `experts`.
        num_experts: ids that its router knows, those of experts that return their token included.
        top_k: experts of a token.
        has_identity: whether experts that return their token are among them.
        takes_absent: whether `experts` takes the id -1.
    """

    name: str
    module: Any
    num_experts: int
    top_k: int
    has_identity: bool
    takes_absent: bool


def replay_routes(model: nn.Module, ids: torch.Tensor, weights: torch.Tensor | None = None) -> ReplayedRoutes:
    """Give the experts of each token to the next forward pass of `model`, made inside `with` of what this returns.

    `model` is one of transformers, in any dtype, whose experts have not been spread by `apply_expert_parallel`, such as
    the one that is trained. `ExpertParallel.replay_routes` is the same for one whose experts have. Without weights the
    gradient of the loss reaches the routers through the weights of the given experts. Activation checkpointing inside
    may run blocks again: they take the same routes, as long as `backward` is inside the block too.

    Args, and what is raised, as of `ExpertParallel.replay_routes`. Given weights are converted to the dtype of those
    that the model's routers answer.
    """
    check_kind("model", model, nn.Module)
    model_config, blocks = model_config_of(model), []
    for name, module in with_experts(model):
        if getattr(module.experts, "is_expert_parallel", False):
            raise ValueError(f"model: {name}.experts are expert-parallel; call replay_routes of their ExpertParallel")
        described = describe_experts(module.experts, f"model: {name}.experts")
        top_k = MoEBlock(0, f"{name}.experts", module, described).top_k(model_config, None)
        identity = described.identity_experts
        blocks.append(RoutedBlock(name, module, described.num_experts + identity, top_k, identity > 0, False))
    if not blocks:
        raise ValueError(f"model: expected MoE blocks with `experts`, found none in {type(model).__name__}")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return ReplayedRoutes(blocks, ids, weights, device)


def checked_ids(name: str, ids: Any, shape: Sequence[int | None], num_experts: int, device: torch.device) -> None:
    """Raise `ValueError` naming `name` unless `ids` are expert ids, or -1, of this shape on `device`, each once in a
    token.

    None in `shape` is any size. Waits for the device.
    """
    if check_is_tensor(name, ids).dtype not in ID_DTYPES:
        raise ValueError(f"{name}: expected {', '.join(map(str, ID_DTYPES))}, got {ids.dtype}")
    if ids.ndim != len(shape) or any(b not in (None, a) for a, b in zip(ids.shape, shape, strict=True)):
        wanted = ", ".join("T" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected [{wanted}], got {list(ids.shape)}")
    check_lies_on(name, ids, device)
    if ids.numel():
        low, high = (int(end) for end in ids.aminmax())
        if low < -1 or high >= num_experts:
            raise ValueError(f"{name}: expected ids from -1 to {num_experts - 1}, got {low if low < -1 else high}")
        ordered = ids.sort(dim=-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if bool(twice.any()):
            place, expert = twice.any(dim=-1).nonzero()[0].tolist(), int(ordered[..., 1:][twice][0])
            raise ValueError(f"{name}: expected an expert once in a token, got {expert} twice in {name}{place}")


def checked_weights(name: str, weights: Any, ids: torch.Tensor) -> None:
    """Raise `ValueError` naming `name` unless `weights` are fp32, one of each of `ids`."""
    if check_is_tensor(name, weights).dtype != torch.float32 or weights.shape != ids.shape:
        got = f"{weights.dtype} {list(weights.shape)}"
        raise ValueError(f"{name}: expected torch.float32 {list(ids.shape)}, as ids, got {got}")
    check_lies_on(name, weights, ids.device)


class _GivenChoice(TorchFunctionMode):
    """Inside, the top-k of a router's scores is `ids_TK`, with the scores of these experts.

    Attributes:
        asked: whether it was asked for.
    """

    def __init__(self, ids_TK: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self.asked = False
        self._ids_TK, self._num_experts = ids_TK, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk) and self._is_choice(*args, **kwargs):
            self.asked = True
            ids_TK = self._ids_TK.clone()
            scores_TE = kwargs["input"] if "input" in kwargs else args[0]
            return torch.return_types.topk((scores_TE.gather(1, ids_TK), ids_TK))
        return func(*args, **kwargs)

    def _is_choice(self, input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, **others: Any) -> bool:
        """Whether it is the choice of experts; routers with groups ask for the top-k of groups before."""
        tokens, top_k = self._ids_TK.shape
        return input.shape == (tokens, self._num_experts) and (k, dim % 2, largest) == (top_k, 1, True)


class ReplayedRoutes:
    """A `with` block around one forward pass of a model, which takes given routes; made by `replay_routes`.

    Attributes:
        layers: how many MoE layers of the pass have taken theirs.
    """

    def __init__(
        self,
        blocks: Sequence[RoutedBlock],
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        device: torch.device,
        context: ExpertParallelContext | None = None,
    ) -> None:
        top_k = blocks[0].top_k if blocks else None
        most = max((block.num_experts for block in blocks), default=0)
        checked_ids("ids", ids, (len(blocks), None, top_k), most, device)
        if weights is not None:
            checked_weights("weights", weights, ids)
        # Copies: rings go on recording. Not inference tensors, which autograd cannot save.
        with torch.inference_mode(False):
            self._ids = ids.to(torch.int64, copy=True)
            self._weights = None if weights is None else weights.clone()
        for block, ids_TK in zip(blocks, self._ids, strict=True):
            _check_block(block, ids_TK, weights is not None)
        self._blocks, self._context = blocks, context
        self._stack = ExitStack()
        self.layers = 0

    def __enter__(self) -> ReplayedRoutes:
        modules = [block.module for block in self._blocks]
        if self.layers or any(module in _REPLAYED for module in modules):
            raise ValueError("replay_routes: the model is in another `with` of it, or this one was entered before")
        with ExitStack() as stack:
            for module in modules:
                _REPLAYED.add(module)
                stack.callback(_REPLAYED.discard, module)
            for index, block in enumerate(self._blocks):
                self._hook(stack, index, block)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()
        if error is None and self.layers != len(self._blocks):
            raise ValueError(
                f"ids: expected a forward pass of {len(self._blocks)} MoE layers inside replay_routes, got "
                f"{self.layers}; a CUDA graph that is replayed asks for none"
            )

    def _hook(self, stack: ExitStack, index: int, block: RoutedBlock) -> None:
        """Give block `index` its routes in each of its calls, until `stack` is closed."""
        ids_TK = self._ids[index]
        weights_TK = None if self._weights is None else self._weights[index]
        absent_TK = ids_TK < 0
        some_absent = bool(absent_TK.any())
        # What the router reads at places of no expert, and what experts get that take no -1, with weight 0.
        present_TK = _filled(ids_TK, block.num_experts) if some_absent else ids_TK
        modes: list[_GivenChoice] = []

        def end_choice() -> None:
            while modes:
                modes.pop().__exit__(None, None, None)

        def begin(module: nn.Module, args: Any) -> None:
            end_choice()
            if weights_TK is None:
                device = next((one.device for one in module.parameters()), ids_TK.device)
                modes.append(_GivenChoice(present_TK.to(device), block.num_experts))
                modes[-1].__enter__()

        def give(module: nn.Module, args: Any, kwargs: Any) -> Any:
            has_weights = weights_TK is not None or any(mode.asked for mode in modes)
            end_choice()
            hidden, index_TK, own_TK = (*args, *(kwargs.get(name) for name in _ARGUMENTS[len(args) :]))[:3]
            with nullcontext() if self._context is None else abort_peers_on_error(self._context):
                self._check_call(index, index_TK, has_weights)
            device = index_TK.device
            absent = absent_TK.to(device)
            new_TK = (ids_TK if block.takes_absent else present_TK).to(device)
            given_TK = own_TK
            if weights_TK is not None:
                # A layer here takes them as they are; others compute in the dtype of their router's weights.
                given_TK = weights_TK.to(device, None if block.takes_absent else own_TK.dtype)
            if some_absent and not block.takes_absent:
                given_TK = given_TK.masked_fill(absent, 0)
            return (hidden, new_TK.to(index_TK.dtype), given_TK), {}

        def end(module: nn.Module, args: Any, output: Any) -> None:
            end_choice()

        stack.callback(end_choice)
        for handle in (
            block.module.register_forward_pre_hook(begin),
            block.module.experts.register_forward_pre_hook(give, with_kwargs=True),
            block.module.register_forward_hook(end, always_call=True),
        ):
            stack.callback(handle.remove)

    def _check_call(self, index: int, index_TK: torch.Tensor, has_weights: bool) -> None:
        """Raise `ValueError` unless it is the turn of layer `index`, with tokens for which there are routes."""
        shape, name = tuple(self._ids.shape[1:]), self._blocks[index].name
        if index_TK.shape != shape:
            raise ValueError(
                f"ids: expected a call of {shape[0]} tokens and top_k {shape[1]}, as they have, got "
                f"{list(index_TK.shape)} in {name}"
            )
        if is_capturing(index_TK.device):
            raise ValueError("replay_routes: a pass that is captured in a CUDA graph cannot be given routes")
        # A router that looks its experts up by the token chooses the same ones again (DeepSeek-V4).
        if not has_weights and not torch.equal(index_TK.long(), self._ids[index].to(index_TK.device)):
            raise ValueError(
                f"weights: expected them, the router of {name} does not choose by torch.topk, and chose other experts"
            )
        # Activation checkpointing runs blocks again in the backward pass, in any order.
        if torch._C._current_graph_task_id() != -1:
            return
        if index != self.layers:
            raise ValueError(
                f"ids: expected one forward pass of {len(self._blocks)} MoE layers in the order of the model, got a "
                f"call of {name} after {self.layers} of them"
            )
        self.layers += 1


def _filled(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Ids with experts that the token does not have in place of each -1.

    >>> _filled(torch.tensor([[-1, 0, -1], [-1, -1, -1], [3, 1, 2]]), 4).tolist()
    [[1, 0, 2], [0, 1, 2], [3, 1, 2]]
    """
    absent_TK = ids_TK < 0
    taken_TE = torch.zeros(len(ids_TK), num_experts + 1, dtype=torch.uint8, device=ids_TK.device)
    taken_TE.scatter_(1, ids_TK.masked_fill(absent_TK, num_experts), 1)
    free_TE = taken_TE[:, :num_experts].sort(dim=1, stable=True).indices
    return torch.where(absent_TK, free_TE.gather(1, (absent_TK.cumsum(dim=1) - 1).clamp(min=0)), ids_TK)


def _check_block(block: RoutedBlock, ids_TK: torch.Tensor, has_weights: bool) -> None:
    """Raise `ValueError` for ids that are right elsewhere, but not in `block`."""
    where = f"in {block.name}"
    if ids_TK.shape[1] != block.top_k:
        raise ValueError(f"ids: expected {block.top_k} experts of a token {where}, got {ids_TK.shape[1]}")
    if not ids_TK.numel():
        return
    if int(ids_TK.max()) >= block.num_experts:
        raise ValueError(f"ids: expected at most {block.num_experts - 1} {where}, got {int(ids_TK.max())}")
    absent_TK = ids_TK < 0
    if block.has_identity and bool(absent_TK.any()):
        raise ValueError(
            f"ids: expected no -1 {where}, which stands for experts that return their token too where a layer recorded "
            "it; give their ids"
        )
    if not has_weights and bool((absent_TK.any(dim=1) & ~absent_TK.all(dim=1)).any()):
        raise ValueError(
            f"weights: expected them, a token {where} has -1 beside an expert, and a router's weights are of top_k "
            "experts"
        )
