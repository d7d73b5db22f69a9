"""`interlace bench optimizer`: training steps with Muon over data parallelism, ours and others.

model.py   sizes, and a small Llama
link.py    a link of known speed between CPU ranks
ways.py    the ways to train it: opened, compared with the synchronous one, stepped
work.py    settings, the race, memory, rows
"""
