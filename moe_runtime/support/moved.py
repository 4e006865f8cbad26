"""Modules that moved: their old names import the new ones for one release, with a `DeprecationWarning`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from moe_runtime.support.deprecation import warn_renamed

MOVED = {
    "arguments": "comm.arguments",
    "calibration": "checkpoints.calibration",
    "checkpoint": "checkpoints.checkpoint",
    "checkpoint_layouts": "checkpoints.layouts",
    "comm.collective": "comm.heaps.collective",
    "comm.heap": "comm.heaps.heap",
    "comm.nvshmem_heap": "comm.heaps.nvshmem_heap",
    "comm.nvshmem_world": "comm.heaps.nvshmem_world",
    "comm.private_heap": "comm.heaps.private_heap",
    "comm.shared_heap": "comm.heaps.shared_heap",
    "compiling": "support.compiling",
    "conversion": "checkpoints.conversion",
    "converted_experts": "checkpoints.converted_experts",
    "errors": "comm.errors",
    "expert_readers": "checkpoints.readers",
    "families": "checkpoints.families",
    "fixed_dtypes": "support.fixed_dtypes",
    "folder_lock": "support.folder_lock",
    "formats": "kernels.formats.number_formats",
    "geometry": "kernels.exchange.geometry",
    "grouped": "kernels.gemm.grouped_rows",
    "kernels.activation": "kernels.gemm.activation",
    "kernels.arrive": "kernels.exchange.dispatch_recv",
    "kernels.bits": "kernels.formats.bits",
    "kernels.combine": "kernels.exchange.combine",
    "kernels.decode_tokens": "kernels.gemm.dequant_tokens",
    "kernels.decoded_gemm": "kernels.gemm.dequant_gemm",
    "kernels.decoded_layout": "kernels.gemm.dequant_layout",
    "kernels.dispatch": "kernels.exchange.dispatch_send",
    "kernels.gemm_arguments": "kernels.gemm.arguments",
    "kernels.gemm_epilogue": "kernels.gemm.epilogue",
    "kernels.gemm_operands": "kernels.gemm.operands",
    "kernels.grouped_gemm": "kernels.gemm.grouped_gemm",
    "kernels.hopper_exchange": "kernels.exchange.cuda",
    "kernels.hopper_shapes": "kernels.exchange.plan",
    "kernels.op_gemm": "kernels.gemm.op_gemm",
    "kernels.quantize": "kernels.formats.quantize",
    "kernels.reference_exchange": "kernels.exchange.reference",
    "kernels.reference_gemm": "kernels.gemm.reference",
    "kernels.reference_op_gemm": "kernels.gemm.op_reference",
    "kernels.reference_quantize": "kernels.formats.reference_quantize",
    "kernels.signalling": "kernels.exchange.signalling",
    "kernels.swizzle": "kernels.formats.swizzle",
    "kernels.tma_gemm": "kernels.gemm.tma_gemm",
    "loading": "checkpoints.loading",
    "memory": "context.memory",
    "mover": "placement.migration",
    "moves": "placement.migration_plan",
    "op_arguments": "ops.arguments",
    "op_inputs": "ops.inputs",
    "op_scales": "ops.scales",
    "op_weights": "ops.weights",
    "parallel": "integrations.transformers",
    "peers": "context.peers",
    "plan": "kernels.formats.scale_blocks",
    "prepared": "kernels.gemm.prepacked",
    "progress": "support.progress",
    "replacement": "placement.rebalance",
    "slots": "placement.physical_experts",
    "tensor_files": "checkpoints.files",
    "tensor_writer": "checkpoints.writer",
    "token_format": "ops.token_format",
    "weights": "kernels.gemm.weights",
}
"""Old name -> new name, both below `moe_runtime`."""

PACKAGE = __name__.split(".")[0]


class _MovedModule(Loader):
    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warn_renamed(name, self.new)
        sys.modules[name] = import_module(self.new)


class MovedModules(MetaPathFinder):
    """Finds the old names in `MOVED`; asked last, so that it costs nothing where a module exists."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = MOVED.get(fullname.removeprefix(f"{PACKAGE}."))
        return None if new is None else ModuleSpec(fullname, _MovedModule(f"{PACKAGE}.{new}"))


def install() -> None:
    """Let `import` find the old names. Safe to call twice."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
