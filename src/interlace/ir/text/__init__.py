"""The text of a Program: `parse(str(program)) == program`.

    printer.py      Program to text
    layout.py       statements that do not fit on a line
    parser.py       text to Program: statements, ops, regions
    assumptions.py  named sizes, and what is assumed of them
    expressions.py  what stands inside statements: names, sizes, views, types
    source.py       the text being parsed: errors with their place, arguments of a call
    spelling.py     what both share, and errors with them: names, literals, excerpts, suggestions

Ops, sites, remarks and the steps of a view are written as `interlace.ir.fields` says: no op stands
here by name but Call and Alloc, which declare buffers.
"""
