"""Writes a site with a strategy (a row of `interlace/strategies.py`), and chooses which.

write.py       a site with a strategy: what is declared, and which rows are computed when
transfers.py   how chunks travel;  whole.py: in one piece, by copies
chunks.py      chunks, slices and the computation on them;  pieces.py: how finely a site is cut
emitter.py     names, tables and views of what is written
choose.py      which strategy a site gets: measured, or predicted by playing it alone
reconsider.py  whether it had better be whole, in the whole schedule
"""
