"""From an FX graph to a serial Program: one stream, one op per node, views as steps.

importer.py      the walk over the graph, and the Program that it writes
normalise.py     one spelling for what torch writes in several; random numbers drawn again
grouped.py       grouped matmuls;  collectives.py: functional collectives
exchanges.py     graphs that communicate and run as traced: they are not imported
inplace.py       updates of inputs put back in place
views.py         views as steps
nodes.py, types.py: questions about FX nodes, and torch's types in the words of a Program
symbols.py       symbolic sizes of a graph as those of a Program
"""
