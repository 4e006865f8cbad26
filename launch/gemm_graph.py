"""Which kernels a call launches, read from a CUDA graph of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def kernel_names(call: Callable[[int], object]) -> list[str]:
    """Names of the kernels that `call(0)` launches, in the order of the graph; needs a CUDA GPU and `cuda-bindings`.

    `call` must be warm: nothing may be compiled while it is captured.
    """
    from cuda.bindings import driver

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call(0)
    handle = driver.CUgraph(init_value=graph.raw_cuda_graph())
    _, _, count = driver.cuGraphGetNodes(handle)
    _, nodes, _ = driver.cuGraphGetNodes(handle, count)
    kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return [_name(driver, node) for node in nodes if driver.cuGraphNodeGetType(node)[1] == kernel]


def _name(driver: Any, node: Any) -> str:
    _, parameters = driver.cuGraphKernelNodeGetParams(node)
    # Kernels of libraries are known by a handle that belongs to no context.
    by_function = int(parameters.func) != 0
    _, name = driver.cuFuncGetName(parameters.func) if by_function else driver.cuKernelGetName(parameters.kern)
    return str(name.decode())
