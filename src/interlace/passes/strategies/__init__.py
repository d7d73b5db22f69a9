"""How a site is written with a strategy.

table.py     the strategies, as rows of data
write.py     a site with a strategy: what is declared, and which rows are computed when
gathers.py, scatters.py, slabs.py, slices.py, exchanges.py: how chunks travel
chunks.py    the computation on chunks;  pieces.py: how finely a site is cut
emitter.py   names, tables and views of what is written
"""
