"""Makes the experts of a layer: from a checkpoint, from a seed, or from tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import torch

from moe_runtime.build import random_expert
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.kept_experts import load_kept
from moe_runtime.checkpoints.loading import FRESH, ExpertTensors, QuantBuffers, quantize_experts
from moe_runtime.config import MoELayerConfig
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.experts import Experts, activation_of, expanded_experts
from moe_runtime.kernels.formats.number_formats import format_named
from moe_runtime.kernels.gemm.prepacked import MAX_PREPACKED_EXPERTS
from moe_runtime.post_expert_norm import PostExpertNorm
from moe_runtime.support.progress import with_progress


class ExpertLoader:
    """Makes experts of one layer, quantized and in the order that the GPU's kernels read.

    It does not refer to the layer: what keeps a loader to load experts again does not keep the layer's weights.

    Args:
        config: of the layer.
        context: of the layer.
        norm: over the result of each expert, as it is when experts are made; None for none.
    """

    def __init__(self, config: MoELayerConfig, context: ExpertParallelContext, norm: PostExpertNorm | None) -> None:
        self._config, self._context, self._norm = config, context, norm

    def _in_order(self, experts: Experts, count: int) -> Experts:
        """`experts`, of a rank with `count`, in the order that the GPU's kernels read, unless they are too many.

        Where ranks go on after a death one may come to hold all experts. Their order must be the same for any number of
        experts then: what is loaded again, and what ranks send each other, goes among others.
        """
        most = count if self._context.recovery is None else self._config.num_experts
        return experts.prepacked() if most <= MAX_PREPACKED_EXPERTS else experts

    def make(
        self,
        experts: Iterable[ExpertTensors | tuple[torch.Tensor, torch.Tensor]],
        count: int,
        buffers: QuantBuffers = FRESH,
    ) -> Experts:
        """The `count` experts of a rank.

        Raises `ValueError` as `moe_runtime.checkpoints.loading.quantize_experts`, and what `experts` raises.
        """
        return self._in_order(self._unpacked(experts, count, buffers), count)

    def none(self, count: int) -> Experts:
        """Weights of zero experts, in the order and with the tensors that `make` gives to `count` experts."""
        return self._in_order(self._unpacked((), 0, FRESH), count)

    def random(self, seed: int, ids: Sequence[int]) -> Experts:
        """The experts `ids`, as `moe_runtime.build.random_expert` draws them on the layer's device."""
        drawn = (random_expert(self._config, seed, expert, self._context.device) for expert in ids)
        return self.make(drawn, len(ids))

    def read(self, checkpoint: Checkpoint, layer: int, ids: Sequence[int], *, shown: bool = False) -> Experts:
        """The experts `ids` of decoder layer `layer`, in order; from their copies in host memory where there are some.

        `shown` asks for a bar on a terminal. Raises `ValueError` as `Checkpoint.experts`.
        """

        def read(some: Sequence[int]) -> Experts:
            buffers = checkpoint.quant_buffers(layer, self._config.weight_format, len(some), self._context.device)
            text = f"rank {self._context.rank}: layer {layer} of {checkpoint.folder.name}"
            # Closed before `checkpoint`, also after an error: its reader uses them until then.
            biases = self._config.expert_bias
            with closing(checkpoint.experts(layer, some, buffers, biases=biases)) as experts:
                made = self._unpacked(with_progress(experts, text, len(some), shown=shown), len(some), buffers)
            # In the form of all of them, of which they may be a part.
            return self._in_order(made, len(ids))

        if not checkpoint.keep_in_host_memory:
            return read(ids)
        return load_kept(checkpoint, layer, self._config, ids, self.none(len(ids)), read)

    def reader(self, checkpoint: Checkpoint, layer: int) -> Callable[[Sequence[int]], Experts]:
        """What reads experts of the same files once more, when `checkpoint` is closed.

        Raises `ValueError` where files have changed since: experts of two models in one layer would go unseen.
        """
        stamps = checkpoint.stamps(layer)

        def read(ids: Sequence[int]) -> Experts:
            with checkpoint.reopened() as files:
                if (now := files.stamps(layer)) != stamps:
                    changed = sorted(name for name in {*now, *stamps} if now.get(name) != stamps.get(name))
                    raise ValueError(f"{checkpoint.folder}: {', '.join(changed)} changed since the layer was loaded")
                return self.read(files, layer, ids)

        return read

    def _unpacked(
        self,
        experts: Iterable[ExpertTensors | tuple[torch.Tensor, torch.Tensor]],
        count: int,
        buffers: QuantBuffers,
    ) -> Experts:
        """As `make`, in the order of the formats."""
        config, context = self._config, self._context
        gate_up, down = quantize_experts(experts, config, count, context.device, buffers)
        make = expanded_experts if config.fp4_multiplied_in == "fp8" else Experts
        return make(
            gate_up,
            down,
            activation_of(config.activation),
            intermediate_format=format_named(config.intermediate_format),
            intermediate_gsf=config.intermediate_gsf,
            engine=context.engine,
            norm=None if self._norm is None else self._norm.norm,
        )
