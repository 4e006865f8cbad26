"""Tokens to the ranks of their experts and back."""

from __future__ import annotations

from moe_runtime.dispatcher.gradients import DifferentiableDispatcher, DispatchedRows
from moe_runtime.dispatcher.handle import CombineSink, DispatchedTokens, DispatchHandle
from moe_runtime.dispatcher.token_dispatcher import TokenDispatcher

__all__ = [
    "CombineSink",
    "DifferentiableDispatcher",
    "DispatchHandle",
    "DispatchedRows",
    "DispatchedTokens",
    "TokenDispatcher",
]
