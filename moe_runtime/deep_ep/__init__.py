"""DeepEP's interface over moe_runtime: `Buffer` with the names, arguments, layouts and semantics of `deep_ep.Buffer`.

`python -m moe_runtime.deep_ep` prints how to import it in place of `deep_ep`. `docs/deep_ep.md` says what is there.
"""

from __future__ import annotations

from moe_runtime.deep_ep.alias import install_alias
from moe_runtime.deep_ep.arguments import topk_idx_t
from moe_runtime.deep_ep.buffer import Buffer
from moe_runtime.deep_ep.events import EventHandle, EventOverlap
from moe_runtime.deep_ep.sizes import Config

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "install_alias", "topk_idx_t"]

__version__ = "2.1.0"
"""The version of DeepEP whose interface this is."""
