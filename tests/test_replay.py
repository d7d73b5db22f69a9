"""scripts/replay.py: what it records, and that it sees a tree that answers otherwise."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = '''
from interlace.cost import default_machine, simulate
from interlace.ir import parse
from interlace.options import Options
from interlace.passes import lower
from interlace.verify import check

program = parse("""
def f(tp: Team[2], x: f32[4, 8], w: f32[8, 6], y: out[f32[8, 6]]):
    full = alloc(f32[8, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.out", full, w, out=y)
    main: free(full)
""".strip())
made = lower(program, Options(strategy="peer"), default_machine("cpu"))
check(made).raise_if_unsound()
simulate([made], default_machine("cpu"))
'''


def replay(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/replay.py", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_tree_that_answers_otherwise_is_seen(tmp_path: Path) -> None:
    cases, other = tmp_path / "cases", tmp_path / "other"
    recorded = replay("record", cases, "--", "-c", PROGRAM)
    assert recorded.returncode == 0, recorded.stderr
    alike = replay("compare", cases, ROOT, ROOT)
    assert alike.returncode == 0, alike.stdout + alike.stderr
    for kind in ("find_sites", "decompose", "schedule", "insert_sync", "check", "simulate"):
        assert f"\n{kind} " in f"\n{alike.stdout}", alike.stdout
    shutil.copytree(ROOT / "src", other / "src")
    changed = other / "src/interlace/passes/insert_sync.py"
    changed.write_text(changed.read_text().replace('f"e{', 'f"event{'))
    differs = replay("compare", cases, ROOT, other)
    assert differs.returncode == 1, differs.stdout
    assert "+    comm: record(event0)" in differs.stdout or "record(event" in differs.stdout
    counts = [line for line in differs.stdout.splitlines() if line.endswith(" differ")]
    wrong = {line.split()[0] for line in counts if not line.endswith(" 0 differ")}
    assert wrong == {"insert_sync"}, "the one pass that was changed"
