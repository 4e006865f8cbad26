"""`deep_ep.utils.event`."""

from moe_runtime.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
