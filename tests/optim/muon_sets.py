"""Coefficients of Newton-Schulz iterations, by step."""

SIMPLE = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's, torch.optim.Muon's default."""
POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853), (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750),
)  # fmt: skip
"""arXiv:2505.16932, divided by its safety factor."""
SETS = {
    "simple": (SIMPLE, 5),
    "polar express": (POLAR_EXPRESS, 5),
    "deepseek v4": ((*[SIMPLE] * 8, (2.0, -1.5, 0.5)), 10),
}
"""With a number of steps."""
