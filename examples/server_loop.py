"""The loop of a server: warm up, capture a CUDA graph where the transport allows it, replay, check, shut down.

    python examples/server_loop.py
    torchrun --nproc-per-node=2 examples/server_loop.py

Every rank does the same number of steps. `check` waits for nothing, so it belongs after each step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_runtime import MoELayer, MoERuntimeError, init_from_env

STEPS, TOKENS = 20, 8


def main() -> int:
    device = init_from_env()
    layer = MoELayer.from_yaml("tiny_cpu")
    context, graph = layer.context, None
    try:
        with layer:  # closes the context that the layer made, on all ranks together
            layer.warm_up()  # compiles, allocates, meets the other ranks
            counters = layer.count_steps()
            x = torch.zeros(TOKENS, layer.config.hidden_size, dtype=torch.bfloat16, device=device)
            if device.type == "cuda" and context.heap.graph_safe:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    y = layer(x, max_tokens=TOKENS)
            for _ in range(STEPS):
                x.copy_(torch.randn(x.shape))  # a graph reads its input at a fixed address
                if graph is not None:
                    graph.replay()
                else:
                    y = layer(x, max_tokens=TOKENS)
                context.check()  # raises what the kernels have recorded so far
            context.check_peers()  # the last check: waits for the GPU
            kind = "graph" if graph is not None else "eager"
            print(f"rank {context.rank}: {counters.read().steps} {kind} steps, last output {tuple(y.shape)}")
    except MoERuntimeError as error:
        print(f"rank {context.rank}: rank {error.rank} failed in {error.phase.name}: {error}")
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
