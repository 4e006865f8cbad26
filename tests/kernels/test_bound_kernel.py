"""Arguments of kernels by name: what a launch writes for the driver, and what is refused."""

from __future__ import annotations

import ctypes
import enum
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.kernels import bound_kernel, nvrtc
from moe_runtime.kernels.bound_kernel import Address, BoundKernel, OneLaunch
from moe_runtime.kernels.nvrtc import Defines
from moe_runtime.kernels.signature import Kind, kernels_of, parameters_of

pytestmark = pytest.mark.cpu_only

CPU = torch.device("cpu")
SOURCE = """
// extern "C" __global__ void commented(int no) {}
struct Pair { int a, b; };
extern "C" __global__ void __cluster_dims__(SIZE, 1, 1) __launch_bounds__(32 * (SIZE + 1), 1)
every_kind(const IDS* ids, const float* __restrict__ scales, void* out,  /* bytes, any (of them) */ u16 *half,
           const __grid_constant__ TensorMap map, Pair pair, int small, u32 number, long long large, float real
#if EXTRA
           , const u64* more
#else
           , u8* other
#endif
) { if (small) return; }
extern "C" __global__ void none() {}
"""
DEFINES = {"SIZE": 2, "IDS": "long long", "EXTRA": 1}


class Map(ctypes.Structure):
    _fields_ = (("content", ctypes.c_int64 * 16),)


class Descriptor:
    """As those of the driver: a kernel reads what lies at `getPtr`."""

    def __init__(self, value: int) -> None:
        self.content = ctypes.c_int64(value)

    def getPtr(self) -> int:
        return ctypes.addressof(self.content)


class Number(enum.IntEnum):
    SEVEN = 7


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "kinds.cu").write_text(SOURCE)
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    parameters_of.cache_clear()
    bound_kernel._KERNELS.clear()
    yield
    parameters_of.cache_clear()
    bound_kernel._KERNELS.clear()


def arguments(**changed: Any) -> dict[str, Any]:
    return {
        "ids": torch.arange(3),
        "scales": torch.ones(2)[1:],
        "out": torch.zeros(2, dtype=torch.uint8),
        "half": torch.zeros(2, dtype=torch.bfloat16),
        "map": Descriptor(-9),
        "pair": Map((1, 2)),
        "small": -5,
        "number": 7,
        "large": 2**40 + 1,
        "real": 0.5,
        "more": None,
    } | changed


def bound(names: Mapping[str, Any], follows: BoundKernel | None = None, **defines: int | str) -> BoundKernel:
    macros = Defines({**DEFINES, **defines})
    return BoundKernel("kinds.cu", "every_kind", macros, block=32, device=CPU, bound=names, follows=follows)


def written(kernel: BoundKernel) -> list[int]:
    """Each argument, as the driver finds it; of one that is passed by value the first 8 bytes."""
    pointers = (ctypes.c_void_p * len(kernel.parameters)).from_address(kernel.address)
    kinds = [ctypes.c_int32 if one.num_bytes == 4 else ctypes.c_int64 for one in kernel.parameters]
    return [kind.from_address(at).value for kind, at in zip(kinds, pointers, strict=True) if at is not None]


def expected(given: Mapping[str, Any]) -> list[int]:
    found = []
    for value in given.values():
        if isinstance(value, torch.Tensor):
            found.append(value.data_ptr())
        elif isinstance(value, float):
            found.append(struct.unpack("<i", struct.pack("<f", value))[0])
        elif isinstance(value, Descriptor):
            found.append(value.content.value)
        elif isinstance(value, Map):
            found.append(value.content[0])
        else:
            found.append(value or 0)
    return found


def test_parameters_are_those_of_the_signature() -> None:
    found = parameters_of("kinds.cu", "every_kind", Defines(DEFINES))
    assert [(p.name, p.type) for p in found] == [
        ("ids", "long long*"),
        ("scales", "float*"),
        ("out", "void*"),
        ("half", "u16*"),
        ("map", "TensorMap"),
        ("pair", "Pair"),
        ("small", "int"),
        ("number", "u32"),
        ("large", "long long"),
        ("real", "float"),
        ("more", "u64*"),
    ]
    kinds = [Kind.POINTER] * 4 + [Kind.STRUCT] * 2 + [Kind.INT32] * 2 + [Kind.INT64, Kind.FLOAT, Kind.POINTER]
    assert [p.kind for p in found] == kinds
    others = parameters_of("kinds.cu", "every_kind", Defines({**DEFINES, "EXTRA": 0, "IDS": "int"}))
    assert (others[0].type, others[-1].name, others[-1].type) == ("int*", "other", "u8*")
    assert kernels_of("kinds.cu") == ("every_kind", "none") and parameters_of("kinds.cu", "none", Defines({})) == ()


def test_a_macro_may_rename_a_kernel() -> None:
    renamed = Defines({**DEFINES, "every_kind": "my_every_kind"})
    assert len(parameters_of("kinds.cu", "my_every_kind", renamed)) == 11
    for name, defines in (("every_kind", renamed), ("my_every_kind", Defines(DEFINES)), ("commented", renamed)):
        with pytest.raises(nvrtc.NvrtcError, match="NOT_FOUND"):
            parameters_of("kinds.cu", name, defines)


@pytest.mark.parametrize(
    "signature", ["short s", "double* d", "int", "int a\n#if A > 1\n, int b\n#endif\n", "int a\n#define A\n"]
)
def test_a_signature_that_is_not_understood_is_refused(signature: str, tmp_path: Path) -> None:
    (tmp_path / "kinds.cu").write_text(f'extern "C" __global__ void odd({signature}) {{}}')
    with pytest.raises(ValueError, match=r"parameter|signature"):
        parameters_of("kinds.cu", "odd", Defines({}))


def test_each_launch_writes_what_it_is_given_and_keeps_what_is_bound() -> None:
    fixed = ("ids", "map", "small", "real")
    given = arguments()
    kernel = bound({name: given[name] for name in fixed})
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"scales": None, "large": -1, "more": torch.arange(2), "pair": Map((3, 4))},
        {"scales": Address(2**47 + 8), "number": Number.SEVEN, "half": torch.nn.Parameter(torch.zeros(1).half())},
        {"number": True, "large": 2**63 - 1},
    )
    for change in changes:
        now = given | change
        kernel.fill({name: now[name] for name in reversed(now) if name not in fixed})
        assert written(kernel) == expected(now)
    assert kernel.grid == (1, 1, 1)
    kernel.fill({name: value for name, value in given.items() if name not in fixed}, (5, 1, 2))
    assert kernel.grid == (5, 1, 2)


def test_a_kernel_that_follows_another_has_its_arguments() -> None:
    """Pointers and integers that the first is given, where both have the same kind."""
    first = bound({"small": 1})
    # Here `number` is a pointer.
    second = bound({"large": 5}, follows=first, u32="u64*")
    own = {"map": Map((6, 7)), "pair": Map((8, 9)), "small": 3, "number": None, "real": 0.25}
    assert second._given.keys() == own.keys()
    given = arguments()
    for change in ({}, {"scales": None, "real": 2.5, "out": torch.zeros(1)}):
        now = given | change
        first.fill({name: value for name, value in now.items() if name != "small"})
        second.fill(own)
        assert written(first) == expected(now | {"small": 1})
        assert written(second) == expected(now | own | {"large": 5})
    with pytest.raises(ValueError, match=r"^every_kind.out: it comes from every_kind"):
        second.fill(own | {"out": None})


def test_what_is_bound_lives_as_long_as_the_kernel() -> None:
    tensor = torch.zeros(3, dtype=torch.uint8)
    kernel = bound({"out": tensor})
    address = tensor.data_ptr()
    del tensor
    others = [torch.ones(3, dtype=torch.uint8) for _ in range(50)]
    assert address not in [other.data_ptr() for other in others] and written(kernel)[2] == address


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": 5}, r"every_kind.ids: expected a tensor, an Address or None for long long\*, got 5"),
        ({"ids": torch.zeros(1)}, "every_kind.ids: expected .* got a tensor of torch.float32"),
        ({"half": torch.zeros(1)}, "every_kind.half: expected .* got a tensor of torch.float32"),
        ({"small": torch.zeros(1)}, "every_kind.small: expected an int of 32 bits for int, got a tensor"),
        ({"small": 2**31}, "every_kind.small: expected an int of 32 bits for int, got 2147483648"),
        ({"small": 1.0}, "every_kind.small: expected an int"),
        ({"small": None}, "every_kind.small: expected an int"),
        ({"large": Address(5)}, "every_kind.large: expected an int of 64 bits"),
        ({"real": 1}, "every_kind.real: expected a float for float, got 1"),
        ({"map": torch.zeros(1)}, "every_kind.map: expected an object that is passed by value for TensorMap"),
        ({"pair": 3}, "every_kind.pair: expected an object"),
        ({"out": Map((1, 2))}, "every_kind.out: expected a tensor"),
        ({"other": None}, "every_kind.other: the kernel has no such parameter"),
    ],
)
def test_arguments_of_other_kinds_are_refused(change: dict[str, Any], said: str) -> None:
    """Whether they are bound, come with the first launch or, where that shows, with a later one."""
    with pytest.raises(ValueError, match=f"^{said}"):
        bound(arguments(**change))
    with pytest.raises(ValueError, match=f"^{said}"):
        bound({}).fill(arguments(**change))
    kernel = bound({})
    kernel.fill(arguments())
    if "got a tensor of" not in said and not isinstance(change.get("large"), Address):
        with pytest.raises(ValueError, match=f"^{said}"):
            kernel.fill(arguments(**change))


def test_names_are_complete_in_every_launch() -> None:
    kernel = bound({"small": 3})
    given = arguments()
    del given["small"]
    for again in range(2):
        if again:
            kernel.fill(given)
        for name in given:
            with pytest.raises(ValueError, match=rf"^every_kind.{name}: expected an argument, got none"):
                kernel.fill({other: value for other, value in given.items() if other != name})
        with pytest.raises(ValueError, match=r"^every_kind.small: it is bound"):
            kernel.fill(given | {"small": 4})
        with pytest.raises(ValueError, match=r"^every_kind.smell: the kernel has no such parameter"):
            kernel.fill({("smell" if name == "out" else name): value for name, value in given.items()})


def test_single_launches_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[BoundKernel] = []

    def launch(kernel: BoundKernel, arguments: Mapping[str, Any], grid: tuple[int, int, int]) -> None:
        kernel.fill(arguments, grid)
        launched.append(kernel)

    monkeypatch.setattr(BoundKernel, "launch", launch)
    for blocks in (3, 4):
        how = {"grid": (blocks, 1, 1), "block": 32, "device": CPU}
        OneLaunch("kinds.cu", "every_kind", Defines(DEFINES), bound={"small": blocks}, **how).launch(
            {name: value for name, value in arguments().items() if name != "small"}
        )
        assert launched[-1].grid == (blocks, 1, 1) and written(launched[-1])[6] == blocks
    assert launched[0] is launched[1] and len(bound_kernel._KERNELS) == 1
    bound_kernel.launch("kinds.cu", "none", Defines({}), grid=(1, 1, 1), block=32, arguments={}, device=CPU, early=True)
    assert launched[2].early and len(bound_kernel._KERNELS) == 2
