"""Interlace hides communication under computation in multi-GPU PyTorch programs."""

from interlace import errors
from interlace.errors import InterlaceError
from interlace.options import Options

__all__ = ["InterlaceError", "Options", "errors"]
__version__ = "0.1.0"
