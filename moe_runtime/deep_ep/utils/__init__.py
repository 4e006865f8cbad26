"""What DeepEP's callers and tests import from `deep_ep.utils`."""

from moe_runtime.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
