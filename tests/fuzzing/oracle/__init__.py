"""The slow twin of the checker, which shares nothing with it but the ops: every order is tried.

machine.py   a machine that does what semantics.md says;  script.py: the acts it plays
"""

from tests.fuzzing.oracle.machine import OracleVerdict, explore

__all__ = ["OracleVerdict", "explore"]
