"""The page of public bugs, from the headers of tests/golden/bugs/ and from what a check says.

$ python docs/generate/bugs.py    # prints the page

The header of NAME.bad.ilc has a title, the thread, what goes wrong there, the fix, and the kind of
the finding; NAME.good.ilc is the same schedule, fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from markdown_table import table

from interlace.ir import parse_set
from interlace.verify import check

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "golden" / "bugs"
GITHUB = "https://github.com/"
HEAD = """\
# Public bugs

<!-- Written by docs/generate from tests/golden/bugs/. Change those, then run `make docs`. -->

Each of these bugs was reported in public, in other software, and each is of a kind that a
static check finds. Here they are as schedules: `NAME.bad.ilc` has the bug, and `NAME.good.ilc`
is the same schedule, fixed. A schedule models what the thread reports, in a few lines; it is
not the code of the project. `interlace check` refuses every bad one for the reason that is
named here, and accepts every good one. An oracle that tries the orders in which the ops can
run, and shares no code with the check, finds a race or a deadlock wherever the check does.

"""


@dataclass(frozen=True)
class Bug:
    """One pair of files: what their header says, and what a check says of the bad one."""

    name: str
    title: str
    thread: str
    wrong: str
    fix: str
    kind: str
    says: str


def read(path: Path) -> Bug:
    """The bug of a file NAME.bad.ilc; a ValueError names what its header lacks."""
    text = path.read_text()
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    fields, wrong, last = {}, [], ""
    for line in lines[1:]:
        key = next(
            (word for word in ("thread", "fix", "finds") if line.startswith(f"{word}: ")), ""
        )
        last = key or last
        if key:
            fields[key] = line.removeprefix(f"{key}: ")
        elif last == "fix":
            fields["fix"] += f" {line}"
        else:
            wrong.append(line)
    lacking = {"thread", "fix", "finds"} - fields.keys()
    if lacking or not wrong or not fields["thread"].startswith(GITHUB):
        raise ValueError(f"{path.name}: its header lacks {sorted(lacking) or 'what goes wrong'}")
    findings = check(parse_set(text, file=path.name)).errors
    says = next(found.message for found in findings if found.kind == fields["finds"])
    name = path.name.removesuffix(".bad.ilc")
    return Bug(
        name, lines[0], fields["thread"], " ".join(wrong), fields["fix"], fields["finds"], says
    )


def bugs() -> list[Bug]:
    """All pairs, by name."""
    return [read(path) for path in sorted(FOLDER.glob("*.bad.ilc"))]


def bugs_page() -> str:
    """explanation/public-bugs.md."""
    found = bugs()
    rows = [
        (str(number), bug.title, f"[{_short(bug.thread)}]({bug.thread})", f"`{bug.kind}`")
        for number, bug in enumerate(found, 1)
    ]
    parts = [HEAD, table(("", "bug", "thread", "found as"), rows)]
    parts += [_section(number, bug) for number, bug in enumerate(found, 1)]
    return "".join(parts)


def _section(number: int, bug: Bug) -> str:
    fields = (
        ("Thread", f"[{_short(bug.thread)}]({bug.thread})"),
        ("What goes wrong", bug.wrong),
        ("The check says", f"`{bug.kind}`: {bug.says}"),
        ("The fix", bug.fix),
        ("Files", f"`tests/golden/bugs/{bug.name}.bad.ilc`, `{bug.name}.good.ilc`"),
    )
    items = "".join(f"- **{key}**: {value}\n" for key, value in fields)
    return f"\n## {number}. {bug.title}\n\n{items}"


def _short(thread: str) -> str:
    """owner/project#123"""
    owner, project, _, number = thread.removeprefix(GITHUB).split("/")
    return f"{owner}/{project}#{number}"


if __name__ == "__main__":
    print(bugs_page())
