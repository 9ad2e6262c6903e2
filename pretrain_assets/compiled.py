"""How inner loops are compiled: by numba, without the interpreter lock.

Invariant: compiled code is kept beside the module, as Python keeps its own, so only the first run after an installation
waits for the compiler (some seconds).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """A function of numbers and arrays as machine code; it must not touch any other object."""
    machine_code: F = numba.njit(nogil=True, cache=True)(function)
    return machine_code
