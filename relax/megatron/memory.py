"""What the C library does with memory that a CPU step frees."""

import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_NEVER: Final = -1
_LARGEST: Final = 32 * 2**20


def keep_freed() -> None:
    """Lets this process keep what it frees, for its next step, and not hand it back to the kernel.

    A step frees and asks again for the same activations of many MiB. Handed back in between, each of their pages is
    mapped and zeroed anew at its first touch, which costs more than the arithmetic that writes it. Tensors above
    32 MiB, the most that glibc keeps, go back as before. A C library without `mallopt` is left as it is.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_TRIM_THRESHOLD, _NEVER)
        set_option(_MMAP_THRESHOLD, _LARGEST)
