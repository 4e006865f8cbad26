"""DeepEP's interface over moe_runtime: `Buffer` and `ElasticBuffer` with its names, arguments, layouts and semantics.

`python -m moe_runtime.deep_ep` prints how to import it in place of `deep_ep`. `docs/deep_ep.md` says what is there.
"""

from __future__ import annotations

from moe_runtime.deep_ep.alias import install_alias
from moe_runtime.deep_ep.arguments import topk_idx_t
from moe_runtime.deep_ep.buffer import Buffer
from moe_runtime.deep_ep.elastic import ElasticBuffer
from moe_runtime.deep_ep.ep_handle import EPHandle
from moe_runtime.deep_ep.events import EventHandle, EventOverlap
from moe_runtime.deep_ep.sizes import Config
from moe_runtime.deep_ep.utils.envs import get_logical_domain_size, get_physical_domain_size

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install_alias",
    "topk_idx_t",
]

__version__ = "2.1.0"
"""The version of DeepEP whose interface this is."""
