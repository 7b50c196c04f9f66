"""Element-wise work on the CPU, in C++: the exact optimizer, casts, sums and checksums.

Arrays are one-dimensional, contiguous and of native byte order, of any length and at any address that is a
multiple of the element size; bf16 numbers travel as their 16 bits, in uint16. The arrays of one call have
one length, and none that is written may share memory with another. A wrong type or dtype raises TypeError;
a wrong length, stride, address or value, or a read-only array that would be written, raises ValueError. The
message names the argument. Nothing is written when an argument is wrong. All functions release the GIL.

The kernels are AVX-512, AVX2 + FMA or plain C++, chosen for the CPU at first use. All give equal bits (the
payload of a NaN excepted), for any number of threads and however an array is cut into calls. The
environment variable TIERSTREAM_ISA (scalar, avx2, avx512) lowers the choice; a name that is unknown or that
the CPU cannot run raises ValueError in every function that uses the kernels.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def cpu_isa() -> Literal["avx512", "avx2", "scalar"]:
    """The instruction set of the kernels in use."""

def adamw_split(
    weight: NDArray[np.uint16],
    low: NDArray[np.uint16],
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    grad: NDArray[np.float32] | NDArray[np.uint16],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
    threads: int,
) -> None:
    """One AdamW step in place on a master kept as bf16 weight and 16 low bits (see `split_master`).

    The master goes through the same fp32 numbers as in `adamw_fp32`, bit for bit.

    Args:
        weight, low: the master, as `split_master` writes it.
        exp_avg, exp_avg_sq: the moments.
        grad: the gradient, fp32 or bf16.
        step: the number of this update, from 1; it sets the bias corrections.
        lr, beta1, beta2, eps, weight_decay: as in torch.optim.AdamW (decoupled decay, Loshchilov and Hutter
            2019).
        grad_scale: the gradient is multiplied by this first, in fp32; 1 leaves it as it is.
        threads: at most this many threads work, 1 to 1024, the calling one among them.
    """

def adamw_fp32(
    master: NDArray[np.float32],
    weight: NDArray[np.uint16] | None,
    exp_avg: NDArray[np.float32],
    exp_avg_sq: NDArray[np.float32],
    grad: NDArray[np.float32] | NDArray[np.uint16],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
    threads: int,
) -> None:
    """One AdamW step in place on an fp32 master; `weight`, if given, becomes the new master rounded by
    `round_bf16`.

    The operations are those of torch.optim.AdamW(foreach=False, fused=False) on fp32 CPU tensors, in the
    same order and with the same roundings, but for two things in which torch departs from its own rule: the
    square root, correctly rounded here, is up to 1 ulp off in torch builds that take it from MKL; and the
    last few elements of a torch tensor, which its vector loop leaves over, are computed without fused
    multiply-add. The other arguments are those of `adamw_split`.
    """

def adamw_scalars(
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
) -> tuple[float, float, float, float, float, float, float, float, float]:
    """What an AdamW step multiplies, adds and divides by, for the same kernel on another device.

    Returns:
        grad_scale, 1 - lr * weight_decay, the factor of the first moment's lerp, whether that lerp starts
        from the gradient (1.0) or from the moment (0.0), beta2, 1 - beta2, the root of the second bias
        correction, eps, and -lr over the first bias correction; each is an fp32 number.
    """

def split_master(master: NDArray[np.float32], weight: NDArray[np.uint16], low: NDArray[np.uint16]) -> None:
    """Split an fp32 master x into `weight`, bf16(x) rounded to nearest, ties away from zero, and `low`, its
    16 low bits.

    `join_master` gives back x exactly for every x that is not a NaN. A finite |x| >= 0x7f7f8000 (3.396e38)
    has an infinite weight, as in any rounding to bf16, and still comes back. A NaN becomes a quiet NaN of
    the same sign, with low = 0.
    """

def join_master(weight: NDArray[np.uint16], low: NDArray[np.uint16], master: NDArray[np.float32]) -> None:
    """Undo `split_master`: master = (weight << 16 | low) - (0x10000 where low >= 0x8000), modulo 2**32, as
    fp32 bits."""

def round_bf16(src: NDArray[np.float32], dst: NDArray[np.uint16]) -> None:
    """Round fp32 to bf16, to nearest, ties to even; overflow gives infinity, a NaN stays a NaN of the same
    sign."""

def sum_squares(grad: NDArray[np.float32] | NDArray[np.uint16], threads: int) -> float:
    """The sum of squares of an fp32 or bf16 array, in fp64; not finite exactly if an element is not
    finite."""

def memory_read(src: NDArray[np.float32], threads: int) -> int:
    """The sum of the elements as unsigned integers, modulo 2**32: reads at the speed of memory."""

def memory_copy(src: NDArray[np.float32], dst: NDArray[np.float32], threads: int) -> None:
    """Copy `src` to `dst` with memcpy, block by block."""

def memory_update(
    dst: Sequence[NDArray[np.float32] | NDArray[np.uint16]],
    src: NDArray[np.float32] | NDArray[np.uint16],
    threads: int,
) -> None:
    """Replace each element x of every array of `dst` by s - x, modulo its width, where s is that of `src`, as
    unsigned integers. A second call undoes the first.

    All arrays are walked side by side, as by AdamW, with as little arithmetic as an update in place can have:
    what memory gives to such a pattern.
    """

def crc32c(buffer: Buffer, seed: int = 0) -> int:
    """CRC-32C (RFC 3720) of an array of bytes; `crc32c(b, crc32c(a))` is that of a followed by b."""
