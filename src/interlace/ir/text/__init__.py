"""The text of a Program: `parse(str(program)) == program`.

    spelling.py  what all share: names, literals, lines, and excerpts and hints for errors
    printer.py   Program to text
    parser.py    text to Program
    load.py      Programs of files

Ops, sites, remarks and the steps of a view are written by the roles of their fields
(`interlace.ir.roles`): no op stands here by name but Alloc, which declares a buffer.
"""
