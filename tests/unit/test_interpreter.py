"""The quicker interpreter computes what Triton's own does, and replaces names once for a launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tests.support.comparison import assert_same_bits

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled here", allow_module_level=True)

from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.support.interpreter import PLAIN_BLOCK_TYPE, PLAIN_BROADCAST, PLAIN_TENSOR, _KnownTypes, _ReplacedOnce

pytestmark = pytest.mark.cpu_only

COLUMNS = 16


@triton.jit
def _mixed(x, y):
    """Products that wrap around, and what a library's function of Triton's finds in them."""
    product = x * y + (x << 3)
    return product, tl.sum(product, axis=1)


@triton.jit
def _rows_kernel(x_ptr, f_ptr, out_ptr, sums_ptr, scaled_ptr, rows, COLUMNS: tl.constexpr):
    c = tl.arange(0, COLUMNS)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        r = row + tl.arange(0, 1)
        at = r[:, None] * COLUMNS + c[None, :]
        x = tl.load(x_ptr + at)
        product, total = _mixed(x, x - 1)
        again, _ = _mixed(product, x)
        tl.store(out_ptr + at, again)
        tl.store(sums_ptr + r, total)
        f = tl.load(f_ptr + at, mask=(x > 0) & (c < COLUMNS - 1)[None, :], other=1.5)
        tl.store(scaled_ptr + at, (tl.exp(f) / tl.max(f, axis=1)[:, None]).to(tl.float16))


def _launch(x: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, sums = torch.full_like(x, -7), torch.full_like(x[:, 0], -7)
    scaled = torch.full(x.shape, torch.nan, dtype=torch.float16)
    _rows_kernel[(3,)](x, f, out, sums, scaled, x.shape[0], COLUMNS=COLUMNS)
    return out, sums, scaled


def test_the_same_bits_as_without_it(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(-(2**31), 2**31, (7, COLUMNS), generator=rng).to(torch.int32)
    f = torch.randn(7, COLUMNS, generator=rng)
    quick = _launch(x, f)
    replaced, types = interpreter._patch_lang, interpreter._get_np_dtype
    assert isinstance(replaced, _ReplacedOnce) and isinstance(types, _KnownTypes)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(interpreter, "_patch_lang", replaced._replace)
    monkeypatch.setattr(interpreter, "_get_np_dtype", types._find)
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=True))
    monkeypatch.setattr(tl.tensor, "__init__", PLAIN_TENSOR)
    monkeypatch.setattr(tl.block_type, "__init__", PLAIN_BLOCK_TYPE)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", PLAIN_BROADCAST)
    for ours, plain in zip(quick, _launch(x, f), strict=True):
        assert_same_bits(ours, plain)
    wrapped = (x.long() * (x.long() - 1) + x.long() * 8).to(torch.int32)
    assert_same_bits(quick[1], wrapped.sum(dim=1, dtype=torch.int32))


def test_shapes_are_shared_and_are_those_of_the_interpreter_itself() -> None:
    assert tl.tensor.__init__ is not PLAIN_TENSOR, "nothing to compare"
    for shape in ([4], [2, 1, 8], [tl.constexpr(2), 16]):
        ours, plain = tl.block_type(tl.int8, shape), tl.block_type.__new__(tl.block_type)
        PLAIN_BLOCK_TYPE(plain, tl.int8, shape)
        assert ours == plain and (ours.numel, ours.name) == (plain.numel, plain.name)
        of_type, of_plain = tl.tensor(None, ours), tl.tensor.__new__(tl.tensor)
        PLAIN_TENSOR(of_plain, None, plain)
        assert (str(of_type), of_type.numel, of_type.dtype) == (str(of_plain), of_plain.numel, of_plain.dtype)
        assert of_type.shape is tl.tensor(None, tl.block_type(tl.float32, shape)).shape
    scalar = tl.tensor(None, tl.int32)
    assert len(scalar.shape) == 0 and scalar.numel == 1 and scalar.type is scalar.dtype is tl.int32
    for wrong, error in (([], TypeError), ([2, 3], ValueError), ([2, 1.0], TypeError), ([2**20, 2], ValueError)):
        for _ in range(2):
            with pytest.raises(error):
                tl.block_type(tl.int8, wrong)


def test_names_are_replaced_once_for_a_launch_and_are_as_before_after_it(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    replaced = interpreter._patch_lang
    own = replaced._replace

    def count(function: object) -> object:
        counted.append(function.__name__)
        return own(function)

    monkeypatch.setattr(replaced, "_replace", count)
    x = torch.randint(-9, 9, (40, COLUMNS), generator=rng).to(torch.int32)
    before = tl.load
    _launch(x, x.float())
    first = len(counted)
    assert 1 <= first <= 4
    _launch(x, x.float())
    assert len(counted) == 2 * first
    assert tl.load is before
    with pytest.raises(interpreter.InterpreterError):
        _launch(x, "no tensor")
    assert tl.load is before
    counted.clear()
    _launch(x, x.float())
    assert len(counted) == first
