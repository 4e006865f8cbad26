"""Which layout the JSON files of a checkpoint mean for each linear: its `quantization_config`, whoever made it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from moe_runtime.checkpoints.compressed_tensors_config import COMPRESSED_METHOD
from moe_runtime.checkpoints.family_table import text_config
from moe_runtime.checkpoints.files import read_json
from moe_runtime.checkpoints.fp8_configs import EXPERT_DTYPE, FP8, MXFP4
from moe_runtime.checkpoints.integer_configs import AWQ, GPTQ
from moe_runtime.checkpoints.layouts import PLAIN, PLAIN_STACKED
from moe_runtime.checkpoints.modelopt_config import MODELOPT_METHOD, WILDCARD
from moe_runtime.checkpoints.patterns import check_work
from moe_runtime.checkpoints.stored_experts import Method, StoredExperts, mapping, plain, with_parents
from moe_runtime.checkpoints.unread_keys import KnownKeys, complaint_of

CONFIG_FILE = "config.json"
MODELOPT_FILE = "hf_quant_config.json"
EXPERTS_KEY = "expert_quantization_config"
"""Key of `config.json` that describes the experts, in the form of `quantization_config`, if the rest of the model is
quantized otherwise. `launch.convert` writes it; other programs do not know it."""
OLD_KEY = "compression_config"
"""What compressed-tensors used to call `quantization_config`."""
_CONFIG_KEYS = (EXPERTS_KEY, "quantization_config", OLD_KEY)
"""Keys of `config.json` that describe the experts. The first that is there counts."""

_METHODS: dict[str, Method] = {
    "modelopt": MODELOPT_METHOD,
    "compressed-tensors": COMPRESSED_METHOD,
    "fp8": FP8,
    "gptq": GPTQ,
    "awq": AWQ,
    "mxfp4": MXFP4,
}
_STACKED_METHODS = ("mxfp4",)
"""Methods of gpt-oss alone."""
_AUTO_ROUND = "export the model again with format auto_gptq, auto_awq or llm_compressor"
_OTHER_METHODS = {
    "quark": "dequantize the model, or take one that compressed-tensors or ModelOpt quantized",
    "auto-round": _AUTO_ROUND,
    "intel/auto-round": _AUTO_ROUND,
    **dict.fromkeys(("bitsandbytes", "torchao", "quanto", "hqq", "eetq", "fbgemm_fp8"), "save the model without it"),
}
"""Methods that are not read, and what to do."""
_ELSE = "take another form of the model, such as the one in bf16"


@dataclass(frozen=True)
class Quantization:
    """How the linears of a checkpoint are quantized; each may differ.

    Attributes:
        file: the JSON file that describes it.
        key: its key there.
        quant_config: what it says, as a `quantization_config`; None if there is none.
        stacked: the model's plain experts are stacked, as in gpt-oss.
        unread: another file that describes it, which does not count.
        ignore_keys: keys that nobody reads and that count as without influence.
    """

    file: Path
    key: str
    quant_config: Mapping[str, Any] | None
    stacked: bool = False
    unread: Path | None = None
    ignore_keys: Collection[str] = field(default=(), compare=False)

    @classmethod
    def of(
        cls, folder: Path, config: Mapping[str, Any], *, stacked: bool = False, ignore_keys: Collection[str] = ()
    ) -> Quantization:
        """Read it from `config`, the parsed `config.json` of `folder`, or else from its `hf_quant_config.json`.

        Raises:
            ValueError: no object, an unknown method, or a key that looks as if it changed values and that nobody
                reads, unless it is in `ignore_keys`; names file and key.
        """
        modelopt = folder / MODELOPT_FILE
        at, text = "", config
        key = next((key for key in _CONFIG_KEYS if config.get(key) is not None), None)
        if key is None:
            at, text = text_config(config)
            key = next((key for key in _CONFIG_KEYS if text.get(key) is not None), None)
        if key is None and modelopt.is_file():
            described = mapping(f"{modelopt}: quantization", read_json(modelopt).get("quantization"))
            recipe = {**described, "quant_method": "modelopt"}
            found = cls(modelopt, "quantization", recipe, stacked, None, ignore_keys)
        else:
            unread = modelopt if modelopt.is_file() else None
            said = None if key is None else text[key]
            if key != EXPERTS_KEY and isinstance(said, Mapping) and said.get("quant_method") == "fp8":
                outside = text.get(EXPERT_DTYPE, config.get(EXPERT_DTYPE))
                said = {EXPERT_DTYPE: outside, **said}
            name = f"{at}{key or 'quantization_config'}"
            found = cls(folder / CONFIG_FILE, name, said, stacked, unread, ignore_keys)
        found._check_method()
        return found

    def _check_method(self) -> None:
        if self.quant_config is None:
            return
        if not isinstance(self.quant_config, Mapping):
            raise ValueError(self.message(f"{self.key}: expected an object, got {self.quant_config!r}"))
        known = [name for name in _METHODS if self.stacked or name not in _STACKED_METHODS]
        method = self.quant_config.get("quant_method")
        if method not in known:
            advice = _OTHER_METHODS.get(str(method), _ELSE)
            raise ValueError(
                self.message(f"{self.key}.quant_method: expected one of {', '.join(known)}, got {method!r}; {advice}")
            )
        try:
            self._refuse(self.quant_config, _METHODS[method].keys, f"{self.key}.")
        except ValueError as error:
            raise ValueError(self.message(str(error))) from None

    def _refuse(self, given: Mapping[str, Any], known: KnownKeys, at: str) -> None:
        """Raise `ValueError`, without the file, for the first key of an object that nobody reads."""
        complaint = complaint_of(given, known, source=str(self.file), at=at, ignored=self.ignore_keys)
        if complaint is not None:
            raise ValueError(complaint)

    def stored(self, names: Sequence[str]) -> StoredExperts:
        """How the linears `names` of one layer, such as `model.layers.0.mlp.experts.0.up_proj`, are stored.

        Linears that are left out of quantization are plain.

        Raises:
            ValueError: an unknown quantization, other block sizes, or `names` that differ; names file, key and linear.
        """
        self._check_work(self.quant_config or {}, len(names))
        found = [self._stored(name) for name in names]
        for name, one in zip(names, found, strict=True):
            if one != found[0]:
                raise ValueError(
                    self.message(
                        f"expected one way to store a layer's experts, got {_words(found[0])} for {names[0]} "
                        f"and {_words(one)} for {name}, by {found[0].key} and {one.key}"
                    )
                )
        return found[0]

    def _check_work(self, quant_config: Mapping[str, Any], num_names: int) -> None:
        try:
            check_work(quant_config, num_names)
        except ValueError as error:
            raise ValueError(f"{self.file}: {error}") from None

    def check_block(self, names: Sequence[str], block: str) -> None:
        """Raise `ValueError`, as `stored`, unless the linears `names`, all within `block`, are stored alike.

        A config with a single scheme needs no look at each linear: the tensors show which are left out of it.
        """
        quant_config = self.quant_config or {}
        method, by_pattern = quant_config.get("quant_method"), quant_config.get("dynamic")
        if method in ("gptq", "awq") and by_pattern and any(by_pattern.values()):
            self.stored(names)
        if method not in ("modelopt", "compressed-tensors", "fp8"):
            return
        groups = quant_config.get("config_groups") or {}
        if len(groups) < 2 and not quant_config.get("quantized_layers") and not quant_config.get("transform_config"):
            return
        near = {key: group | {"targets": _within(block, group.get("targets"))} for key, group in groups.items()}
        # A group without targets means all linears.
        less = {key: group for key, group in near.items() if group["targets"] or not groups[key].get("targets")}
        short = {**quant_config, "config_groups": less}
        if method == "compressed-tensors":
            short["ignore"] = _within(block, quant_config.get("ignore"))
        self._check_work(short, len(names))
        quick = replace(self, quant_config=short)
        first = quick._stored(names[0])
        for name in names:
            if not quick._is_stored_as(first, name):
                # The places in messages are those in the whole lists.
                self.stored([names[0], name])

    def _is_stored_as(self, stored: StoredExperts, name: str) -> bool:
        try:
            return self._stored(name) == stored
        except ValueError:
            return False

    def refuse_plain(self, names: Sequence[str], why: str) -> NoReturn:
        """Raise `ValueError` for linears that are left out of quantization, of which the last is quantized (`why`)."""
        raise ValueError(self.message(f"{self.stored(names).key} leaves {names[-1]} out of quantization, but {why}"))

    def _stored(self, name: str) -> StoredExperts:
        if self.quant_config is None:
            found = plain(f"the lack of {self.key}")
        else:
            try:
                method = _METHODS[self.quant_config["quant_method"]]
                found = method.stored(self.key, self.quant_config, name, self._refuse)
            except ValueError as error:
                raise ValueError(self.message(str(error))) from None
        return replace(found, layout=PLAIN_STACKED) if self.stacked and found.layout is PLAIN else found

    def message(self, text: str) -> str:
        """`text`, which begins with a key, after the file, and with the file that does not count."""
        return f"{self.file}: {text}{f' ({self.unread} is there too, but was not read)' if self.unread else ''}"


def _within(block: str, targets: Sequence[str] | None) -> list[str]:
    """`targets` without names of linears outside `block`: a config may list every linear of a model."""
    above = {*with_parents(block), "Linear"}
    return [
        target
        for target in targets or ()
        if target in above or target.startswith(("re:", f"{block}.")) or WILDCARD.search(target)
    ]


def _words(stored: StoredExperts) -> str:
    return f"{stored.layout.name} (for {stored.token_format} tokens)"
