"""The text being parsed: errors that show where they are, and the arguments of a call."""

from __future__ import annotations

import ast
import functools
import re
import sys
import warnings
from dataclasses import dataclass
from functools import cached_property

from interlace.errors import ParseError
from interlace.ir.fields import Form
from interlace.ir.ops import Loc
from interlace.ir.text.spelling import did_you_mean, excerpt, lines_of

MAX_TEXT = 1 << 24
"""Characters of a text: some 100,000 ops."""
TOO_LONG = "an integer of more than 64 bits"
_LONG = re.compile(r"\d\w{16}")
"""Start of every integer of more than 64 bits, as it has 17 digits or more."""

Node = ast.expr | ast.stmt | ast.arg | ast.keyword


class SourceText:
    """A text with the name of its file."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.lines = lines_of(text)

    def error(self, node: Node | None, what: str, fix: str) -> ParseError:
        """The error to raise for a node."""
        if node is None:
            return self.error_at(1, None, 1, what, fix)
        end = node.end_col_offset if node.end_lineno == node.lineno else None
        column = self.column(node.lineno, node.col_offset)
        length = 1 if end is None else self.column(node.lineno, end) - column
        return self.error_at(node.lineno, column, length, what, fix)

    def error_at(
        self, line: int, column: int | None, length: int, what: str, fix: str
    ) -> ParseError:
        """The error to raise for a place in the text."""
        place = f"{self.file}:{line}" + (f":{column}" if column else "")
        shown = excerpt(self.lines, line, column, length)
        return ParseError(f"{place}: {what}\n{shown}\nfix: {fix}")

    def column(self, line: int, offset: int) -> int:
        """The column (from 1) of a byte offset, which is how `ast` counts."""
        if line > len(self.lines):
            return 1
        return len(self.lines[line - 1].encode()[:offset].decode(errors="replace")) + 1

    def loc(self, node: Node) -> Loc:
        """Where a node stands."""
        return Loc(file=self.file, line=node.lineno, text=(self.file, node.lineno))

    def tree(self) -> ast.Module:
        """The text as Python's syntax tree, with the limits kept that every text has."""
        if len(self.text) > MAX_TEXT:
            raise self.error_at(
                1, None, 1, f"more than {MAX_TEXT} characters", "write several files"
            )
        tree = self._read()
        if _LONG.search(self.text) is None:  # walking a whole tree takes as long as reading it
            return tree
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                if node.value >= 1 << 64:
                    raise self.error(node, TOO_LONG, "write a smaller number")
        return tree

    def _read(self) -> ast.Module:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as an unknown escape in a string
                return ast.parse(self.text)
        except SyntaxError as error:
            line = min(max(error.lineno or 1, 1), len(self.lines))
            if f"({sys.get_int_max_str_digits()} digits)" in error.msg:  # Python reads no more
                raise self.error_at(line, None, 1, TOO_LONG, "write a smaller number") from None
            raise self.error_at(
                line,
                min(error.offset, len(self.lines[line - 1]) + 1) if error.offset else None,
                1,
                f"not the syntax of a schedule: {error.msg}",
                "a schedule is written in Python's syntax: check brackets, commas and indentation",
            ) from None
        except (ValueError, MemoryError, RecursionError) as error:
            what = "nested too deeply" if not isinstance(error, ValueError) else str(error)
            raise self.error_at(
                1, None, 1, f"the text cannot be read: {what}", "give the text of a schedule"
            ) from None


@dataclass(frozen=True)
class Signature:
    """Arguments that a call takes: positional names and keywords, some of them required."""

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    rest: bool = False
    """Takes any number of further positional arguments."""
    any_keyword: bool = False
    """Takes keywords of any name."""

    @cached_property
    def known(self) -> tuple[str, ...]:
        """All names."""
        return (*self.positional, *self.keywords)

    def usage(self, name: str) -> str:
        """The form of a call, for errors: its arguments, without site, loc and stream."""
        keywords = [f"{key}=..." for key in self.keywords if key not in ("site", "loc", "stream")]
        return f"{name}({', '.join([*self.positional, *['...'] * self.rest, *keywords])})"


@functools.cache
def signature_of(form: Form) -> Signature:
    """The signature of a dataclass that is written as a call."""
    fields = [field for field in form.fields if not field.how.rest]
    return Signature(
        positional=tuple(field.keyword for field in fields if field.positional),
        keywords=(
            *dict.fromkeys(field.keyword for field in fields if not field.positional),
            *form.common,
        ),
        required=tuple(field.keyword for field in fields if field.required),
        rest=len(fields) < len(form.fields),
        any_keyword=any(field.role == "keywords" for field in fields),
    )


class Arguments:
    """The arguments of one call, bound to a signature; every one is asked for by name."""

    def __init__(self, source: SourceText, call: ast.Call, name: str, signature: Signature) -> None:
        self.call = call
        self.bound: dict[str, ast.expr] = {}
        self.rest: list[ast.expr] = []
        self.others: list[tuple[str, ast.expr]] = []
        names = signature.positional
        for place, node in enumerate(call.args):
            if isinstance(node, ast.Starred):
                raise source.error(node, "'*' has no meaning here", "write the arguments out")
            if place < len(names):
                self.bound[names[place]] = node
            elif signature.rest:
                self.rest.append(node)
            else:
                count = f"{len(names)} positional argument{'s' if len(names) != 1 else ''}"
                fix = f"write {signature.usage(name)}"
                raise source.error(node, f"{name}(...) takes {count}", fix)
        seen = set(self.bound)
        for keyword in call.keywords:
            key = keyword.arg
            if key is None:
                raise source.error(keyword, "'**' has no meaning here", "write the arguments out")
            if key in seen:
                raise source.error(keyword, f"{name}(...) has {key!r} twice", "remove one of them")
            seen.add(key)
            if key in signature.known:
                self.bound[key] = keyword.value
            elif signature.any_keyword:
                self.others.append((key, keyword.value))
            else:
                fix = did_you_mean(key, signature.known, f"{name}(...) takes")
                raise source.error(keyword, f"{name}(...) has no argument {key!r}", fix)
        for key in signature.required:
            if key not in self.bound:
                fix = f"write {signature.usage(name)}"
                raise source.error(call, f"{name}(...) lacks {key!r}", fix)

    def get(self, name: str) -> ast.expr | None:
        """The argument of that name; None if it is not given or is the word None."""
        node = self.bound.get(name)
        return None if isinstance(node, ast.Constant) and node.value is None else node

    def given(self, name: str) -> bool:
        """True if the argument is given, even as None."""
        return name in self.bound

    def __getitem__(self, name: str) -> ast.expr:
        return self.bound[name]
