"""What ranks do together before the first run.

ranks.py        which rank of a Program this process is
agreement.py    ranks agree on a Program
plan.py         what a concrete Program says before anything is allocated
shares.py       slots, words and backends, set up once by all together
registered.py   the tensors that a caller registers
"""
