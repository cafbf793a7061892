"""Eight float32 lanes as a value that numba code can hold in a register.

numba leaves vectorizing to LLVM, which may pick another order of additions for another loop
shape. A kernel whose results must not depend on how its work was blocked needs the order
written down, so this module gives numba a `f32x8` type and a dozen operations on it. They
are plain LLVM vector instructions: AVX2 on x86, two NEON registers on ARM. Every `fma` rounds
once and no operation is ever reordered.

Arrays are one-dimensional and contiguous; offsets count elements and are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, float32, njit
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 8

_I32 = ir.IntType(32)
_F32X8 = ir.VectorType(ir.FloatType(), LANES)
_I32X8 = ir.VectorType(_I32, LANES)


class F32x8(types.Type):
    """numba's name for eight float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="f32x8")


f32x8 = F32x8()


@register_model(F32x8)
class _F32x8Model(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: types.Type) -> None:
        super().__init__(manager, fe_type, _F32X8)


def _pointer(context: Any, builder: Any, array_type: types.Type, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _load(context: Any, builder: Any, array_type: types.Type, array: Any, offset: Any) -> Any:
    pointer = builder.bitcast(_pointer(context, builder, array_type, array, offset), _F32X8.as_pointer())
    value = builder.load(pointer)
    value.align = 4
    return value


def _store(context: Any, builder: Any, array_type: types.Type, array: Any, offset: Any, value: Any) -> None:
    pointer = builder.bitcast(_pointer(context, builder, array_type, array, offset), _F32X8.as_pointer())
    builder.store(value, pointer).align = 4


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


@intrinsic
def load(typingctx, array, offset):
    """`array[offset : offset + 8]`."""

    def codegen(context, builder, signature, args):
        return _load(context, builder, signature.args[0], args[0], args[1])

    return f32x8(array, types.intp), codegen


@intrinsic
def store(typingctx, array, offset, value):
    """`array[offset : offset + 8] = value`."""

    def codegen(context, builder, signature, args):
        _store(context, builder, signature.args[0], *args)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x8), codegen


@intrinsic
def splat(typingctx, value):
    """The same number in all lanes."""

    def codegen(context, builder, signature, args):
        undefined = ir.Constant(_F32X8, ir.Undefined)
        one = builder.insert_element(undefined, args[0], ir.Constant(_I32, 0))
        return _shuffle(builder, one, undefined, [0] * LANES)

    return f32x8(types.float32), codegen


@intrinsic
def first(typingctx, value):
    """Lane 0."""

    def codegen(context, builder, signature, args):
        return builder.extract_element(args[0], ir.Constant(_I32, 0))

    return types.float32(f32x8), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """`a * b + c`, rounded once."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_F32X8, [_F32X8] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v8f32"), args)

    return f32x8(f32x8, f32x8, f32x8), codegen


def _binary(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """An operation on two vectors from the function that emits its instructions."""

    def operation(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return emit(builder, *args)

        return f32x8(f32x8, f32x8), codegen

    return intrinsic(operation)


add = _binary(lambda builder, a, b: builder.fadd(a, b))
sub = _binary(lambda builder, a, b: builder.fsub(a, b))
mul = _binary(lambda builder, a, b: builder.fmul(a, b))
div = _binary(lambda builder, a, b: builder.fdiv(a, b))
# A NaN in `a` stays, one in `b` is dropped: with the data as `a`, clamping hides no NaN.
at_least = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a))
at_most = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), b, a))


def _reduction(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """A reduction over the lanes, always as ((0,4),(2,6)),((1,5),(3,7))."""

    def operation(typingctx, value):
        def codegen(context, builder, signature, args):
            value = args[0]
            for half in (4, 2, 1):
                upper = [(lane + half) % LANES for lane in range(LANES)]
                value = emit(builder, value, _shuffle(builder, value, value, upper))
            return builder.extract_element(value, ir.Constant(_I32, 0))

        return types.float32(f32x8), codegen

    return intrinsic(operation)


lane_sum = _reduction(lambda builder, a, b: builder.fadd(a, b))
lane_max = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a))


@intrinsic
def _power_of_two(typingctx, shifted):
    """2**n from n + 1.5 * 2**23, whose lowest bits are n; n = -127 gives 0."""

    def codegen(context, builder, signature, args):
        def constant(value: int) -> ir.Constant:
            return ir.Constant(_I32X8, [value] * LANES)

        bits = builder.add(builder.bitcast(args[0], _I32X8), constant(127))
        return builder.bitcast(builder.shl(bits, constant(23)), _F32X8)

    return f32x8(f32x8), codegen


@njit(forceinline=True)
def exp(x):
    """e**x for x up to 88, within 2 units in the last place; below -87.7 (also -inf) exactly 0.

    x = n ln 2 + r with |r| <= ln 2 / 2; e**r is a polynomial (coefficients: Cephes, `expf`).
    """
    x = at_least(x, splat(float32(-88.0)))
    magic = splat(float32(12582912.0))  # 1.5 * 2**23: adding it rounds to an integer
    shifted = fma(x, splat(float32(1.4426950408889634)), magic)
    n = sub(shifted, magic)
    r = fma(n, splat(float32(-0.693359375)), x)
    r = fma(n, splat(float32(2.12194440e-4)), r)
    y = splat(float32(1.9875691500e-4))
    y = fma(y, r, splat(float32(1.3981999507e-3)))
    y = fma(y, r, splat(float32(8.3334519073e-3)))
    y = fma(y, r, splat(float32(4.1665795894e-2)))
    y = fma(y, r, splat(float32(1.6666665459e-1)))
    y = fma(y, r, splat(float32(5.0000001201e-1)))
    y = add(fma(mul(r, r), y, r), splat(float32(1.0)))
    return mul(y, _power_of_two(shifted))


@njit(forceinline=True)
def tanh(x):
    """tanh(x), absolute error below 2e-7."""
    x = at_most(at_least(x, splat(float32(-10.0))), splat(float32(10.0)))
    one = splat(float32(1.0))
    two = splat(float32(2.0))
    return sub(one, div(two, add(exp(mul(two, x)), one)))


@intrinsic
def transpose(typingctx, source, rows, target, offset, stride):
    """Eight rows of eight become columns.

    `target[offset + j * stride + i] = source[rows[i] + j]` for i, j in 0..7; `rows` is a tuple
    of eight offsets.
    """

    def codegen(context, builder, signature, args):
        source, rows, target, offset, stride = args
        lines = [
            _load(context, builder, signature.args[0], source, builder.extract_value(rows, i)) for i in range(LANES)
        ]
        # Three rounds of interleaving row i with row i + 4 turn row numbers into lane numbers.
        low = [0, 8, 1, 9, 2, 10, 3, 11]
        high = [4, 12, 5, 13, 6, 14, 7, 15]
        for _ in range(3):
            lines = [_shuffle(builder, lines[i], lines[i + 4], lanes) for i in range(4) for lanes in (low, high)]
        for line in lines:
            _store(context, builder, signature.args[2], target, offset, line)
            offset = builder.add(offset, stride)
        return context.get_dummy_value()

    return types.void(source, rows, target, types.intp, types.intp), codegen


@intrinsic
def prefetch(typingctx, array, offset):
    """Ask for the cache line of `array[offset]`; never faults."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        pointer = builder.bitcast(_pointer(context, builder, signature.args[0], args[0], args[1]), byte)
        builder.call(function, [pointer, ir.Constant(_I32, 0), ir.Constant(_I32, 3), ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def fetch_add(typingctx, array, offset, amount):
    """Add to an int64 element as one indivisible step; the value before. Orders memory for all threads."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


def _array_at(element: types.Type) -> Any:
    @intrinsic
    def pointer(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.intp), codegen

    @njit(forceinline=True)
    def array_at(address, size):
        return carray(pointer(address), (size,))

    return array_at


# Arrays over memory that the caller keeps alive, from `tensor.data_ptr()`: handing numba thirty
# numbers takes a few microseconds, eight arrays several times that.
float32_at = _array_at(types.float32)
int32_at = _array_at(types.int32)
int64_at = _array_at(types.int64)
