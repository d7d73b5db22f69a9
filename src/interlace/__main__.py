"""`python -m interlace`: the same as the command `interlace`.

$ python -m interlace check ring.ilc
"""

from interlace.cli import main

if __name__ == "__main__":
    main()
