"""How inner loops are compiled: by numba, without the interpreter lock.

Invariant: compiled code is kept beside the package, as Python keeps its own, under a digest of the source of every
compiled loop, so only the first run after an installation or a change waits for the compiler. numba itself would look
at the file of the loop alone, and keep what a loop in another file was compiled into it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """A function of numbers and arrays as machine code; it must not touch any other object."""
    machine_code: F = numba.njit(nogil=True, cache=True)(function)
    return machine_code


def source_digest() -> str:
    """Stands for the source of all compiled loops of this package."""
    package = Path(__file__).parent
    sources = (path.read_bytes() for path in sorted(package.rglob("*.py")))
    return hashlib.sha256(b"".join(text for text in sources if b"@compiled" in text)).hexdigest()[:16]


if "NUMBA_CACHE_DIR" not in os.environ:  # where it cannot be written, numba takes a folder of the user's
    _folder = Path(__file__).parent / "__pycache__" / f"compiled-{source_digest()}"
    numba.config.CACHE_DIR = str(_folder)
    if not _folder.exists():
        logging.getLogger(__name__).info("inner loops are compiled when first used, once: a minute or two in all")
