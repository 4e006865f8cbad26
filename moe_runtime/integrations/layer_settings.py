"""Settings of layers that another library makes: formats, limits, and how ranks reach each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed.device_mesh import DeviceMesh

from moe_runtime.build import context_from_config
from moe_runtime.comm.heaps.private_heap import PrivateHeap
from moe_runtime.config import (
    MAX_EXPERTS,
    MoELayerConfig,
    ParallelConfig,
    RecordedRoutesConfig,
    check_stated,
    complaints,
    read_yaml,
)
from moe_runtime.context.expert_parallel import ExpertParallelContext
from moe_runtime.support.arguments import check_kind, check_path

DEFAULT_MAX_TOKENS = 2048

ANY_SIZES = {"hidden_size": 1024, "intermediate_size": 1024, "num_experts": MAX_EXPERTS, "top_k": 1}
"""Sizes that every format has, with which settings are checked before a model is there."""

ENGINE_FIELDS = (
    "max_tokens_per_rank",
    "token_buckets",
    "token_format",
    "weight_format",
    "fp4_multiplied_in",
    "combine_format",
    "expert_row_capacity",
    "host_capacity",
    "num_sms",
    "intermediate_gsf",
)
"""Fields of `MoELayerConfig` that do not follow from the model that an inference engine runs."""


@dataclass(frozen=True)
class LayerSettings:
    """What the layers of a model have in common.

    Attributes:
        parallel: transport, engine and time limits.
        fields: fields of `MoELayerConfig`, but for those that follow from the model.
        routes: what an inference engine's layers record of their routes; None for nothing.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fields: Mapping[str, Any] = field(default_factory=lambda: {"max_tokens_per_rank": DEFAULT_MAX_TOKENS})
    routes: RecordedRoutesConfig | None = None


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming each of `fields` that no layer can have, whatever its sizes."""
    try:
        MoELayerConfig.model_validate(ANY_SIZES | dict(fields))
    except ValidationError as error:
        raise ValueError("; ".join(complaints(error))) from None


def checked_settings(parallel: ParallelConfig | None, fields: Mapping[str, Any]) -> LayerSettings:
    """Settings of these; `parallel` has its defaults if None. Raises `ValueError` naming a wrong argument."""
    if parallel is not None:
        check_kind("parallel", parallel, ParallelConfig)
    check_fields(fields)
    return LayerSettings(parallel or ParallelConfig(), fields)


def settings_from_yaml(path: str | Path) -> LayerSettings:
    """The settings of a YAML file: `layer`, with any of `ENGINE_FIELDS`, `parallel`, as in a run's file, and `routes`.

    Raises `ValueError` naming the file and what is wrong in it.
    """
    file = check_path("path", path)
    if not file.is_file():
        raise ValueError(f"settings: no file {path}")
    data = read_yaml(file)
    parts = {name: {} if data.get(name) is None else data[name] for name in ("layer", "parallel", "routes")}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ValueError(f"{file}: {name}: expected a mapping, got {type(part).__name__}")
    fields = parts["layer"]
    for prefix, found, keys in (("", data, tuple(parts)), ("layer.", fields, ENGINE_FIELDS)):
        if others := [key for key in found if key not in keys]:
            raise ValueError(f"{file}: {prefix}{others[0]}: unknown key, expected one of {', '.join(keys)}")
    try:
        parallel = ParallelConfig.model_validate(parts["parallel"])
        check_fields({"max_tokens_per_rank": DEFAULT_MAX_TOKENS} | _with_engine_weights(fields))
    except ValidationError as error:
        raise ValueError(f"{file}: parallel.{'; parallel.'.join(complaints(error))}") from None
    except ValueError as error:
        raise ValueError(f"{file}: layer.{error}") from None
    for name in ("on_failure", "lost_experts"):
        if getattr(parallel, name) != (usual := ParallelConfig.model_fields[name].default):
            raise ValueError(f"{file}: parallel.{name}: expected {usual}, since an engine ends with any of its ranks")
    try:
        routes = None if data.get("routes") is None else RecordedRoutesConfig.model_validate(parts["routes"])
    except ValidationError as error:
        raise ValueError(f"{file}: routes.{'; routes.'.join(complaints(error))}") from None
    return LayerSettings(parallel, fields, routes)


def _with_engine_weights(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` with a format of weights that goes with them, where the engine's, which is not known yet, has to."""
    if fields.get("fp4_multiplied_in") == "fp8" and fields.get("weight_format") in (None, "auto"):
        return {**fields, "weight_format": "mxfp4"}
    return dict(fields)


def settings_of_variable(variable: str) -> LayerSettings:
    """What an environment variable that is set asks for: `1` the defaults, anything else the path of a YAML file.

    Raises `ValueError` naming the variable.
    """
    value = os.environ[variable].strip()
    try:
        return LayerSettings(fields={}) if value == "1" else settings_from_yaml(value)
    except (OSError, ValueError) as error:
        raise ValueError(f"{variable}: expected 0, 1 or the path of a YAML file: {error}") from error


def layer_config(name: str, stated: Mapping[str, Any], fields: Mapping[str, Any]) -> MoELayerConfig:
    """The config of the layer `name` of a model, of which the model states `stated`, with the settings `fields`.

    Raises `ValueError` naming the layer for what no layer can have, and where `fields` contradict the model.
    """
    try:
        made = MoELayerConfig.model_validate(dict(stated) | dict(fields))
    except ValidationError as error:
        raise ValueError(f"{name}: {'; '.join(complaints(error))}") from None
    check_stated("the model", stated, made)
    return made


def context_of(
    parallel: ParallelConfig, group: dist.ProcessGroup | DeviceMesh | None, device: torch.device
) -> ExpertParallelContext:
    """Over the ranks of `group`; without one this rank is alone, also where torch.distributed has others."""
    if group is not None:
        return context_from_config(parallel, group, device)
    (heap,) = PrivateHeap.group(1, device)
    return ExpertParallelContext(
        heap=heap,
        engine=parallel.engine,
        timeout_s=parallel.timeout_s,
        startup_timeout_s=parallel.startup_timeout_s,
    )
