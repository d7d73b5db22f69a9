"""Resources that a compiled kernel takes, read from its machine code: no GPU is needed.

assert resources(source.compile())["STACK"] == 0     # PTX does not tell: ptxas spills after it
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def resources(compiled: Any) -> dict[str, int]:
    """Registers (REG), bytes of stack (STACK) and of shared memory that is not dynamic (SHARED)."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    (line,) = re.findall(r"REG:.*", told.stdout)
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line)}


def spills(compiled: Any) -> bool:
    """Returns True if registers were spilled."""
    return resources(compiled)["STACK"] > 0
