"""Thousands of wrong calls of each operation: each a ValueError that names its argument, before any kernel runs."""

from __future__ import annotations

import inspect
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_runtime.ops import operations
from moe_runtime.ops.arguments import check_choice, resolve_validate
from tests.support.comparison import assert_same_bits
from tests.support.op_cases import OpCase, fp8, moe_fp8, mxfp8, nvfp4_closed, nvfp4_dense

CPU = torch.device("cpu")
WRONG_CALLS = 2000
"""Different ones of each operation."""

MOST_DRAWS = 20000
Arguments = dict[str, Any]
Wrong = tuple[str, Arguments]
"""The argument that the message must name, and what to change of a right call."""

OFFSETS = [0, 132, 132, 260, 300]
SIZES = [132, 0, 128, 40]
OTHER_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
)
NOT_TENSORS = (None, 3, 2.5, "a", [1, 2], (), {}, object())


def calls() -> dict[str, Callable[[], OpCase]]:
    def rng() -> torch.Generator:
        return torch.Generator().manual_seed(1)

    return {
        "dense": lambda: nvfp4_dense(SIZES, 136, 256, rng(), CPU, ids=[2, 0, -1, 1], num_experts=4),
        "closed": lambda: nvfp4_closed(SIZES, 136, 256, rng(), CPU),
        "mxfp8": lambda: mxfp8(SIZES, 136, 1040, rng(), CPU),
        "moe_fp8": lambda: moe_fp8(SIZES, 136, 400, rng(), CPU),
        "fp8": lambda: fp8(SIZES, 136, 256, rng(), CPU),
        "fp8_blocks": lambda: fp8([256, 0, 128, 40], 136, 256, rng(), CPU, gm=128, major="K"),
    }


def fingerprint(name: str, change: Arguments) -> tuple[object, ...]:
    """What makes a wrong call another one: dtypes, shapes, strides, devices, and the numbers of small tensors."""
    parts: list[object] = [name]
    for key, value in sorted(change.items()):
        if isinstance(value, torch.Tensor):
            small = value.device.type == "cpu" and value.dtype in (torch.int32, torch.uint32) and value.numel() <= 16
            numbers = tuple(value.flatten().tolist()) if small else ()
            parts.append((key, str(value.dtype), tuple(value.shape), value.stride(), str(value.device), numbers))
        else:
            parts.append((key, type(value).__name__, repr(value) if type(value) is not object else ""))
    return tuple(parts)


def right_call(name: str) -> tuple[OpCase, Arguments]:
    case = calls()[name]()
    return case, case.arguments | ({"c": case.empty()} if case.is_in_place else {"out": None})


def wrong_tensors(arguments: Arguments, optional: tuple[str, ...], allowed: dict[str, set[torch.dtype]]) -> list[Wrong]:
    """Other types, dtypes, shapes, devices and strides of each tensor."""
    found: list[Wrong] = []
    for name, tensor in arguments.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        found += [(name, {name: t}) for t in NOT_TENSORS if not (t is None and name in optional)]
        right = allowed.get(name, {tensor.dtype})
        empty = [torch.empty(tensor.shape, dtype=dtype) for dtype in OTHER_DTYPES if dtype not in right]
        found += [(name, {name: t}) for t in empty]
        found.append((name, {name: tensor.to("meta")}))
        found += [(name, {name: tensor[None]}), (name, {name: tensor.reshape(-1)[:1].reshape(())})]
        if tensor.ndim > 1:
            found += [(name, {name: tensor.reshape(-1)}), (name, {name: tensor.flatten(0, 1)})]
        if tensor.is_floating_point() and tensor.dtype == torch.float32:
            found.append((name, {name: tensor.clone().requires_grad_()}))
        for strided in _strided(tensor):
            found.append((name, {name: strided}))
    return found


def _strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same shape with other strides: every second element, dimensions swapped, all elements one."""
    for dim in range(tensor.ndim):
        if tensor.shape[dim] > 1:
            size = list(tensor.shape)
            size[dim] *= 2
            yield torch.empty(size, dtype=tensor.dtype)[tuple([slice(None)] * dim + [slice(None, None, 2)])]
    for i, j in itertools.combinations(range(tensor.ndim), 2):
        if tensor.shape[i] > 1 and tensor.shape[j] > 1:
            swapped = torch.empty_strided(
                tensor.transpose(i, j).shape, tensor.transpose(i, j).contiguous().stride(), dtype=tensor.dtype
            ).transpose(i, j)
            if swapped.stride() != tensor.stride():
                yield swapped
    if tensor.numel() > 1:
        yield torch.empty(1, dtype=tensor.dtype).as_strided(tensor.shape, [0] * tensor.ndim)


def wrong_sizes(arguments: Arguments, fixed: dict[str, tuple[int, ...]], random_: random.Random) -> Iterator[Wrong]:
    """Tensors with one dimension off, for those dimensions that the other arguments fix."""
    while True:
        name = random_.choice(sorted(fixed))
        tensor, dim = arguments[name], random_.choice(fixed[name])
        size = list(tensor.shape)
        least = 1 if name == "alpha" else 0  # without elements it is legal
        size[dim] = random_.choice([s for s in range(least, 2 * size[dim] + 3) if s != size[dim]])
        yield name, {name: _like(tensor, size)}


def _like(tensor: torch.Tensor, size: list[int]) -> torch.Tensor:
    """Of `size`, dimensions in the order in memory that `tensor` has."""
    order = sorted(range(tensor.ndim), key=lambda d: -tensor.stride(d))
    inverse = [order.index(d) for d in range(tensor.ndim)]
    return torch.empty([size[d] for d in order], dtype=tensor.dtype).permute(inverse)


def wrong_indptr(name: str, rows: int, unit: int, random_: random.Random) -> Iterator[Wrong]:
    """Offsets that do not start at 0, decrease, end past the rows, or miss the multiple."""
    while True:
        middle = sorted(random_.randrange(0, rows // unit + 1) * unit for _ in range(3))
        values, kind = [0, *middle, rows // unit * unit], random_.randrange(4 if unit > 1 else 3)
        if kind == 0:
            values[0] = random_.choice([-unit, unit, 1, -1, 2**31 - 1])
        elif kind == 1:
            index = random_.randrange(1, 4)
            values[index] = values[index + 1] + unit * random_.randrange(1, 50)
            values[index + 1] = values[index] - unit * random_.randrange(1, 50)
        elif kind == 2:
            values[4] = rows + unit * random_.randrange(1, 1000)
        else:
            values[random_.randrange(1, 4)] += random_.choice([1, 2, 3])
        yield name, {name: torch.tensor(values, dtype=torch.int32)}


def wrong_choices(table: dict[str, tuple[Any, ...]]) -> list[Wrong]:
    return [(name, {name: value}) for name, values in table.items() for value in values]


COMMON = {"validate": (1, 0, "yes", 2.0, []), "engine": ("nvcc", "", 1, None, "Torch")}
OUT = {"out_dtype": (torch.float32, torch.int8, torch.float64, "bfloat16", 16)}


def bad_outputs(name: str, rows: int, n: int, dtypes: tuple[torch.dtype, ...]) -> list[Wrong]:
    found: list[Wrong] = []
    for dtype in OTHER_DTYPES:
        if dtype not in dtypes:
            found.append((name, {name: torch.empty(rows, n, dtype=dtype)}))
    for dtype in dtypes:
        for size in ((rows - 1, n), (rows + 1, n), (rows, n - 1), (rows, n + 8), (n, rows), (rows * n,), (1, rows, n)):
            found.append((name, {name: torch.empty(size, dtype=dtype)}))
        found.append((name, {name: torch.empty(rows, n, dtype=dtype, device="meta")}))
        found.append((name, {name: torch.empty(n, rows, dtype=dtype).t()}))
        found.append((name, {name: torch.empty(rows, 2 * n, dtype=dtype)[:, ::2]}))
        found.append((name, {name: torch.empty(1, n, dtype=dtype).expand(rows, n)}))
        found.append((name, {name: torch.empty(rows * n, dtype=dtype).as_strided((rows, n), (n - 1, 1))}))
        found.append((name, {name: torch.empty(rows, n, dtype=dtype, requires_grad=True)}))
    found += [(name, {name: value}) for value in (3, "out", [])]
    return found


def generate(key: str, case: OpCase, arguments: Arguments) -> Iterator[Wrong]:
    """Wrong calls without end: the fixed ones first, then random sizes and offsets."""
    random_ = random.Random(7)
    rows, n, k = case.rows.shape[0], case.weights.shape[1], case.rows.shape[1]
    e4m3, e5m2, i32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int32
    streams: list[Iterator[Wrong]] = []
    if key == "dense":
        allowed = {"c": {torch.bfloat16, torch.float16, torch.float32}}
        allowed |= {name: {i32, torch.uint32} for name in ("group_offsets", "group_scale_offsets")}
        yield from wrong_tensors({k: v for k, v in arguments.items() if k != "c"}, (), allowed)
        yield from bad_outputs("c", rows, n, (torch.bfloat16, torch.float16, torch.float32))
        yield from wrong_choices(COMMON | {"num_active_experts": (-1, -5, 2.0, "4", None, True, [4])})
        for tensor in (torch.tensor([5], dtype=i32), torch.tensor([-1], dtype=i32), torch.tensor([4]), torch.ones(2)):
            yield "num_active_experts", {"num_active_experts": tensor}
        for count in range(5, 60):
            yield "group_offsets", {"num_active_experts": count}
        # K of b is what a says; of a, what is no multiple of 16.
        for columns in range(k // 2 - 7, k // 2):
            yield "a", {"a": torch.empty(rows, columns, dtype=torch.uint8)}
        yield "a", {"a": torch.empty(rows, 0, dtype=torch.uint8)}
        yield "b", {"b": torch.empty(4, 0, k // 2, dtype=torch.uint8)}
        fixed = {
            "b": (2,),
            "c": (0, 1),
            "a_scales": (1, 2, 3, 4),
            "b_scales": (0, 1, 2, 3, 4, 5),
            "expert_scales": (0,),
        }
        streams.append(wrong_sizes(arguments, fixed, random_))
        streams.append(wrong_indptr("group_offsets", rows, 1, random_))
        streams.append(_wrong_experts(random_))
        streams.append(_wrong_scale_offsets(arguments, random_))
        streams.append(_too_short(arguments, random_))
    elif key == "closed":
        yield from wrong_tensors({k: v for k, v in arguments.items()}, ("alpha",), {})
        yield from bad_outputs("out", rows, n, (torch.bfloat16, torch.float16))
        tiles = {"tile_m": (64, 256, 0, 128.0, None, True), "tile_n": (16, 256, 0, -32, 96, "64", None)}
        tiles |= {"tile_k": (64, 512, 0, 192, None), "swap_ab": (1, 0, None, "yes")}
        yield from wrong_choices(COMMON | OUT | tiles)
        yield "out_dtype", {"out": case.empty(), "out_dtype": torch.float16}
        for columns in range(k // 2 - 63, k // 2):
            yield "a", {"a": torch.empty(rows, columns, dtype=torch.uint8)}
        for columns in range(n - 7, n):
            yield "b", {"b": torch.empty(4, columns, k // 2, dtype=torch.uint8)}
        container = arguments["a_scale"]
        for size in range(container.shape[0]):
            yield "a_scale", {"a_scale": container[:size]}
        fixed = {"b": (2,), "a_scale": (1,), "b_scale": (0, 1, 2), "alpha": (0,), "m_indptr": (0,)}
        streams.append(wrong_sizes(arguments, fixed, random_))
        streams.append(wrong_indptr("m_indptr", rows, 4, random_))
    elif key == "mxfp8":
        yield from wrong_tensors({k: v for k, v in arguments.items()}, (), {})
        yield from bad_outputs("out", rows, n, (torch.bfloat16,))
        granularities = [g for g in itertools.product((0, 1, 16, 32, 64, 128, 256), repeat=3) if g[:2] != (1, 1)]
        granularities += [(1, 1, 16), (1, 1, 64), (1, 1, 0), (1, 1), (1, 1, 128, 1), 128, None, "mnk", (1, 1, 128.0)]
        steer = {"scale_granularity_mnk": tuple(granularities), "backend": ("cutlass", "", None, 1)}
        steer["scale_major_mode"] = ("K", "mn", None, 0)
        steer["is_gated"] = (1, 0, None, "yes", 1.0)
        odd = mxfp8(SIZES, 135, k, torch.Generator(), CPU).arguments
        yield "b", {"b": odd["b"], "b_scale": odd["b_scale"], "is_gated": True}
        yield "out", {"out": case.empty(), "is_gated": True}
        yield from wrong_choices(COMMON | OUT | steer | {"out_dtype": (torch.float16, torch.float32, "bf16")})
        for columns in range(k - 15, k):
            yield "a", {"a": torch.empty(rows, columns, dtype=torch.uint8).view(e4m3)}
        # With blocks of 32 there are four times as many words.
        yield "a_scale", {"scale_granularity_mnk": (1, 1, 32)}
        for size in range(arguments["a_scale"].shape[0]):
            packed = torch.empty(arguments["a_scale"].shape[1], size, dtype=i32).t()
            yield "a_scale", {"a_scale": packed}
        fixed = {"b": (2,), "a_scale": (0, 1), "b_scale": (0, 1, 2), "m_indptr": (0,)}
        streams.append(wrong_sizes(arguments, fixed, random_))
        streams.append(wrong_indptr("m_indptr", rows, 1, random_))
    elif key == "moe_fp8":
        yield from wrong_tensors({k: v for k, v in arguments.items()}, (), {})
        yield from bad_outputs("out", rows, n, (torch.bfloat16,))
        granularities = [g for g in itertools.product((0, 1, 32, 64, 128, 256), repeat=3) if g != (1, 128, 128)]
        granularities += [(1, 128), (1, 128, 128, 1), 128, None, (1, 128.0, 128), (True, 128, 128)]
        steer = {"scale_granularity_mnk": tuple(granularities), "backend": ("cutlass", "", None, 1)}
        steer |= {"scale_major_mode": ("K", "mn", None, 0), "is_gated": (1, 0, None, "yes", 1.0)}
        yield from wrong_choices(COMMON | OUT | steer | {"out_dtype": (torch.float16, torch.float32, "bf16")})
        yield "out", {"out": case.empty(), "is_gated": True}
        for columns in range(k - 15, k):
            yield "a", {"a": torch.empty(rows, columns, dtype=torch.uint8).view(e4m3)}
        for columns in range(n - 7, n):
            yield "b", {"b": torch.empty(4, columns, k, dtype=torch.uint8).view(e4m3)}
        fixed = {"b": (2,), "a_scale": (0, 1), "b_scale": (0, 1, 2), "m_indptr": (0,)}
        streams.append(wrong_sizes(arguments, fixed, random_))
        streams.append(wrong_indptr("m_indptr", rows, 1, random_))
    else:
        gm = arguments["scale_granularity_mnk"][0]
        yield from wrong_tensors({k: v for k, v in arguments.items() if k != "a"}, (), {})
        yield from wrong_tensors({"a": arguments["a"]}, (), {"a": {e4m3, e5m2}})
        yield "b", {"a": arguments["a"].view(torch.uint8).view(e5m2)}
        yield from bad_outputs("out", rows, n, (torch.bfloat16, torch.float16))
        granularities = [g for g in itertools.product((0, 1, 64, 128, 256), repeat=3) if g[1:] != (128, 128)]
        granularities += [(0, 128, 128), (64, 128, 128), (1, 128), 128, None, (1, 128.0, 128)]
        steer = {"scale_granularity_mnk": tuple(granularities), "mma_sm": (0, 3, 1.0, None, True, "1")}
        yield from wrong_choices(COMMON | OUT | steer | {"scale_major_mode": ("N", "k", "", None, 1)})
        yield "out_dtype", {"out": case.empty(), "out_dtype": torch.float16}
        yield "a_scale", {"scale_major_mode": "K" if arguments["scale_major_mode"] == "MN" else "MN"}
        for columns in (*range(k - 127, k), 0):
            yield "a", {"a": torch.empty(rows, columns, dtype=torch.uint8).view(e4m3)}
        for columns in range(n - 7, n):
            yield "b", {"b": torch.empty(4, columns, k, dtype=torch.uint8).view(e4m3)}
        along_m = 1 if arguments["scale_major_mode"] == "MN" else 0
        for size in range(arguments["a_scale"].shape[along_m]):
            yield "a_scale", {"a_scale": arguments["a_scale"].narrow(along_m, 0, size).contiguous()}
        fixed = {"b": (2,), "a_scale": (1 - along_m,), "b_scale": (0, 1, 2), "m_indptr": (0,)}
        streams.append(wrong_sizes(arguments, fixed, random_))
        streams.append(wrong_indptr("m_indptr", rows, 4, random_))
        if gm == 128:
            streams.append(_not_at_blocks(rows, random_))
    for stream in itertools.cycle(streams):
        yield next(stream)


def _wrong_experts(random_: random.Random) -> Iterator[Wrong]:
    while True:
        ids = [random_.randrange(-1, 4) for _ in range(4)]
        ids[random_.randrange(4)] = random_.choice([-2, 4, 5, 100, 2**31 - 1, -(2**31), random_.randrange(4, 1 << 20)])
        yield "expert_ids", {"expert_ids": torch.tensor(ids, dtype=torch.int32)}


def _wrong_scale_offsets(arguments: Arguments, random_: random.Random) -> Iterator[Wrong]:
    """Blocks that overlap or leave the buffer; the groups have 2, 0, 1, 1 blocks from row 0, 132, 132, 260 on."""
    blocks = arguments["a_scales"].shape[0]
    while True:
        starts = [0, 2, 2, 3]
        group = random_.choice([0, 2, 3])
        if random_.random() < 0.5:
            starts[group] = random_.choice([-1, -2, blocks, blocks + random_.randrange(1, 1000)])
        else:
            starts = random_.choice([[0, 2, 1, 3], [0, 2, 3, 3], [1, 2, 2, 3], [2, 9, 2, 4], [0, 2, 0, 3]])
        shifts = [start - row // 128 for start, row in zip(starts, OFFSETS, strict=False)]
        dtype = random_.choice([torch.int32, torch.uint32])
        yield "group_scale_offsets", {"group_scale_offsets": torch.tensor(shifts, dtype=torch.int32).view(dtype)}


def _too_short(arguments: Arguments, random_: random.Random) -> Iterator[Wrong]:
    while True:
        name = random_.choice(["group_offsets", "group_scale_offsets", "expert_ids"])
        size = random_.randrange(arguments[name].shape[0])
        yield name, {name: arguments[name][:size].clone()}


def _not_at_blocks(rows: int, random_: random.Random) -> Iterator[Wrong]:
    while True:
        first = random_.choice([row for row in range(4, rows, 4) if row % 128])
        yield "m_indptr", {"m_indptr": torch.tensor([0, first, rows, rows, rows], dtype=torch.int32)}


@pytest.mark.parametrize("key", calls())
def test_wrong_calls_are_refused_by_name(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, arguments = right_call(key)
    case.operation(**arguments)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(operations, "op_gemm", never)
    refused: Counter[str] = Counter()
    seen = set()
    for name, change in itertools.islice(generate(key, case, arguments), MOST_DRAWS):
        if (mark := fingerprint(name, change)) in seen:
            continue
        seen.add(mark)
        try:
            case.operation(**(arguments | change))
        except ValueError as error:
            text = str(error)
            assert text.startswith(f"{name}: ") and "expected" in text and "got" in text, (name, text)
            refused[name] += 1
        else:
            raise AssertionError(f"accepted: {name}, {change}")
        if len(seen) == WRONG_CALLS:
            break
    assert refused.total() == WRONG_CALLS
    assert set(refused) == set(inspect.signature(case.operation).parameters), refused


@pytest.mark.parametrize("key", calls())
def test_values_are_not_read_without_validation(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, arguments = right_call(key)
    ran = []
    monkeypatch.setattr(operations, "op_gemm", lambda *_, **__: ran.append(1))
    name = "group_offsets" if case.is_in_place else "m_indptr"
    wrong = torch.tensor([7, 5, 4, 3, 999], dtype=torch.int32).view(arguments[name].dtype)
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    case.operation(**(arguments | {name: wrong, "validate": False}))
    assert ran == [1]


def test_legal_sparse_scales_are_accepted() -> None:
    """Gaps between groups, groups out of order, scales of an empty group anywhere."""
    case, arguments = right_call("dense")
    arguments["a_scales"] = torch.zeros(20, 4, 32, 4, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for starts in ([0, -1, 7, 19], [17, 99, 5, 0], [3, 0, 2, 1]):
        shifts = [start - row // 128 for start, row in zip(starts, OFFSETS, strict=False)]
        case.operation(**(arguments | {"group_scale_offsets": torch.tensor(shifts, dtype=torch.int32)}))


def test_shapes_of_no_rows_or_groups_are_accepted() -> None:
    case = nvfp4_dense([], 32, 64, torch.Generator().manual_seed(1), CPU, num_experts=0)
    case.run()


def test_a_choice_is_of_its_type() -> None:
    check_choice("x", 1, (1, 2))
    with pytest.raises(ValueError, match=r"^x: expected 1 or 2, got True"):
        check_choice("x", True, (1, 2))


def test_validation_is_free_on_a_cpu_only() -> None:
    assert resolve_validate(None, CPU) and not resolve_validate(None, torch.device("cuda"))
    assert resolve_validate(True, torch.device("cuda")) and not resolve_validate(False, CPU)


@pytest.mark.parametrize("name", ["dense", "closed"])
def test_scales_with_a_sign_are_refused_where_they_count(name: str) -> None:
    """Blackwell reads them without; padding and the rows of groups without an expert may hold anything."""
    case = calls()[name]()
    for argument in ("a_scales", "b_scales") if name == "dense" else ("a_scale", "b_scale"):
        scales = case.arguments[argument].view(torch.uint8)
        live = (scales != 0x7F).nonzero()  # what is between is NaN
        assert 0 < len(live) < scales.numel()

        def run(scales: torch.Tensor, argument: str = argument, **more: Any) -> torch.Tensor:
            return case.run(**{argument: scales.view(case.arguments[argument].dtype)}, **more)

        assert_same_bits(run(torch.where(scales == 0x7F, 0xFF, scales)), case.run(), argument)
        for place in live[[0, -1]].tolist():
            signed = scales.clone()
            signed[tuple(place)] |= 0x80
            with pytest.raises(ValueError, match=f"^{argument}: expected no negative scale"):
                run(signed)
            run(signed, validate=False)
    if name == "dense":
        # The third group has no expert, and the block where its scales start is its own.
        scales = case.arguments["a_scales"].clone()
        scales.view(torch.uint8)[132 // 128 + int(case.arguments["group_scale_offsets"][2])] |= 0x80
        assert_same_bits(case.run(a_scales=scales), case.run(), "of a skipped group")


@pytest.mark.parametrize("key", calls())
def test_an_output_that_shares_memory_with_an_input_is_refused(key: str) -> None:
    """Also where only its last element does; next to it, and between the rows of the output, an input may lie."""
    case, arguments = right_call(key)
    if case.is_in_place:
        case.arguments["expert_ids"] = arguments["expert_ids"] = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    name, want = ("c" if case.is_in_place else "out"), case.run()
    rows, n = want.shape
    for other, tensor in arguments.items():
        if not isinstance(tensor, torch.Tensor) or other == name:
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent *= tensor.element_size()
        room = -(-extent // 16) * 16
        width, gap = 2 * n, -(-extent // 2) * 2

        def inside(memory: torch.Tensor, at: int, tensor: torch.Tensor = tensor, extent: int = extent) -> torch.Tensor:
            view = memory[at : at + extent].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            return view.copy_(tensor)

        memory = torch.zeros(room + width * rows, dtype=torch.uint8)
        apart = memory[room:].view(torch.bfloat16).view(rows, n)
        assert_same_bits(case.run(apart, **{other: inside(memory, 0)}), want)
        before = -(-width * rows // 16) * 16
        memory = torch.zeros(before + room, dtype=torch.uint8)
        out = memory[: width * rows].view(torch.bfloat16).view(rows, n)
        assert_same_bits(case.run(out, **{other: inside(memory, before)}), want)
        # One row, behind which the input begins before the row ends.
        align = tensor.element_size() if tensor.element_size() > 2 else 2
        memory = torch.zeros(before + room, dtype=torch.uint8)
        out = memory[: width * rows].view(torch.bfloat16).view(rows, n)
        shared = inside(memory, (width * rows - 1) // align * align)
        with pytest.raises(ValueError, match=f"^{name}: expected memory apart from {other}, got an overlap"):
            case.run(out, **{other: shared})
        # Between the first two rows.
        stride = -(-(width + 16 + gap) // 16) * 16
        memory = torch.zeros(stride * rows, dtype=torch.uint8)
        out = memory.view(torch.bfloat16).view(rows, stride // 2)[:, :n]
        between = inside(memory, -(-width // 16) * 16)
        assert_same_bits(case.run(out, **{other: between}), want)
        shared = inside(memory, -(-width // 16) * 16 - 16)
        with pytest.raises(ValueError, match=f"^{name}: expected memory apart from {other}, got an overlap"):
            case.run(out, **{other: shared})
