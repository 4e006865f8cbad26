"""`quant_method: gptq` and `awq`: integers that AutoGPTQ, GPTQModel, AutoRound and AutoAWQ pack along columns or rows.

The tensors show which linears are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_runtime.checkpoints.layouts import Packing, transposed_integers
from moe_runtime.checkpoints.patterns import matches, pattern_of
from moe_runtime.checkpoints.stored_experts import (
    Method,
    Refuse,
    StoredExperts,
    block_sizes,
    expect,
    known_keys,
    mapping,
)
from moe_runtime.support.arguments import describe

_CALIBRATION = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse", "act_group_aware", "v2"),
    *("model_seqlen", "dataset", "tokenizer", "batch_size", "pad_token_id", "max_input_length", "iters", "lr"),
    *("minmax_lr", "nsamples", "seqlen", "amp", "low_gpu_mem_usage", "gradient_accumulate_steps", "enable_alg_ext"),
    *("enable_minmax_tuning", "enable_quanted_input", "enable_norm_bias_tuning", "autoround_version", "act_bits"),
    *("gptaq", "gptaq_alpha", "gptaq_memory_device", "v2_alpha", "v2_memory_device", "foem", "scale_search", "hessian"),
    *("pack_impl", "mock_quantization", "offload_to_disk", "offload_to_disk_path", "fail_safe", "model_free"),
    *("act_group_size", "act_sym", "act_dynamic", "act_data_type", "cache_block_outputs", "hyb_act", "quant_lm_head"),
)
"""How quants were found, and what inputs of AutoRound's models may be rounded to."""
_NAMES = (
    *("model_name_or_path", "model_file_base_name", "block_name_to_quantize", "quant_block_list", "lm_head"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "inside_layer_modules"),
    *("modules_to_not_convert", "to_quant_block_names", "meta", "quantizer", "uri"),
)
"""What was quantized, which the tensors show, and by whom."""
_KERNELS = (
    *(
        "backend",
        "use_cuda_fp16",
        "use_exllama",
        "disable_exllama",
        "exllama_config",
        "use_triton",
        "use_marlin",
        "scale_dtype",
    ),
    *("do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
)
"""How others run it. The dtype of scales is that of their tensors."""
_SYNONYMS = {"group_size": "groupsize", "desc_act": "actorder", "checkpoint_format": "format"}


def _value(at: str, quant_config: Mapping[str, Any], key: str) -> Any:
    """The value of a key, which may stand under another name too."""
    other = _SYNONYMS[key]
    first, second = quant_config.get(key), quant_config.get(other)
    if first is not None and second is not None:
        expect(f"{at}.{other}", second, first)
    return second if first is None else first


def _group_size(at: str, size: Any) -> int | None:
    """Columns that share a scale; None for all."""
    return None if size == -1 else block_sizes(f"{at}.group_size", [size], 1)[0]


def _flag(at: str, value: Any, default: bool | None) -> bool | None:
    if value is None:
        return default
    expect(at, value, True, False)
    return bool(value)


def _gptq(at: str, quant_config: Mapping[str, Any], name: str, refuse: Refuse) -> StoredExperts:
    bits, form = quant_config.get("bits"), _value(at, quant_config, "checkpoint_format") or "gptq"
    if type(bits) is not int or bits not in (2, 4, 8):
        raise ValueError(f"{at}.bits: expected 2, 4 or 8, got {bits!r}")
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"{at}.checkpoint_format: expected 'gptq' or 'gptq_v2', got {form!r}")
    _check_packed(at, quant_config)
    expect(f"{at}.is_marlin_format", quant_config.get("is_marlin_format") or False, False)
    expect(f"{at}.data_type", quant_config.get("data_type") or "int", "int")
    _check_no_other_settings(f"{at}.dynamic", quant_config, name)
    size = _group_size(at, _value(at, quant_config, "group_size"))
    layout = replace(
        transposed_integers(Packing.GPTQ, bits, size),
        zero_offset=1 if form == "gptq" else 0,
        symmetric=_flag(f"{at}.sym", quant_config.get("sym"), None),
        whole_words=_made_by_gptqmodel(quant_config),
        own_order=bool(_flag(f"{at}.desc_act", _value(at, quant_config, "desc_act"), False)),
    )
    return StoredExperts(layout, "bf16", f"{at}.quant_method")


def _check_no_other_settings(at: str, quant_config: Mapping[str, Any], name: str) -> None:
    """Raise `ValueError` if a linear has settings of its own.

    The first pattern that matches it counts. One with `-:` leaves it out, which the tensors show.
    """
    for signed, settings in mapping(at, quant_config.get("dynamic") or {}).items():
        try:
            found = matches(pattern_of(signed), name)
        except ValueError as error:
            raise ValueError(f"{at}: {describe(signed)}: {error}") from None
        if found and not signed.startswith("-:"):
            where = f"{at}[{json.dumps(signed)}]"
            for key, value in mapping(where, settings).items():
                expect(f"{where}.{key} of {name}", value, quant_config.get(key))
        if found:
            return


def _check_packed(at: str, quant_config: Mapping[str, Any]) -> None:
    expect(f"{at}.pack_dtype", quant_config.get("pack_dtype") or "int32", "int32", "torch.int32")


def _made_by_gptqmodel(quant_config: Mapping[str, Any]) -> bool:
    """GPTQModel subtracts 1 from whole words of zero points, AutoGPTQ from each."""
    meta = quant_config.get("meta")
    makers = meta.get("quantizer") if isinstance(meta, Mapping) else None
    return "gptqmodel" in str(makers).lower()


def _awq(at: str, quant_config: Mapping[str, Any], name: str, refuse: Refuse) -> StoredExperts:
    bits = quant_config.get("bits", quant_config.get("w_bit"))
    expect(f"{at}.bits", bits, 4)
    for key in ("version", "format", "checkpoint_format"):
        form = quant_config.get(key) or "gemm"
        expect(f"{at}.{key}", form.lower() if isinstance(form, str) else form, "gemm")
    expect(f"{at}.zero_point", quant_config.get("zero_point", True), True)
    expect(f"{at}.desc_act", quant_config.get("desc_act") or False, False)
    if str(quant_config.get("backend")).lower() == "llm-awq":
        raise ValueError(f"{at}.backend: expected one that packs as AutoAWQ, got 'llm-awq'")
    _check_packed(at, quant_config)
    _check_no_other_settings(f"{at}.dynamic", quant_config, name)
    size = quant_config.get("group_size", quant_config.get("q_group_size"))
    layout = transposed_integers(Packing.AWQ, 4, _group_size(at, size))
    return StoredExperts(layout, "bf16", f"{at}.quant_method")


GPTQ = Method(
    _gptq,
    known_keys(
        (
            *("bits", "group_size", "groupsize", "sym", "desc_act", "actorder", "checkpoint_format", "format"),
            *("pack_dtype", "is_marlin_format", "data_type", "dynamic", "method"),
        ),
        (*_CALIBRATION, *_NAMES, *_KERNELS),
    ),
)
AWQ = Method(
    _awq,
    known_keys(
        (
            *("bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "checkpoint_format"),
            *("desc_act", "pack_dtype", "backend", "dynamic", "method"),
        ),
        # Zero points are stored, whatever `sym` says: transformers writes its default beside `zero_point`.
        ("sym", "ignore", *_CALIBRATION, *_NAMES, *_KERNELS),
    ),
)
