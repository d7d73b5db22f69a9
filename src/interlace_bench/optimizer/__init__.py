"""`interlace bench optimizer`: training steps with Muon over data parallelism, ours and others.

work.py    the model, the ways to train it, compared with the synchronous one, and rows
link.py    a link of known speed between CPU ranks
"""
