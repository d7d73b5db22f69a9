"""From an FX graph to a serial Program: one stream, one op per node, views as steps.

import_fx.py     the whole;  importer.py walks, emitter.py writes, imported.py is what it gives
normalise.py     one spelling for what torch writes in several;  grouped.py: grouped matmuls
collectives.py   functional collectives;  views.py: views as steps
inplace.py       updates of inputs put back in place
rng.py           random numbers that backward draws again
types.py, graphs.py, locs.py, devices.py: what these stand on
"""
