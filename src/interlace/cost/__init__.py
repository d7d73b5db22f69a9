"""What a Program costs: a machine model, op times, the simulator and the timelines it predicts."""

from interlace.cost.timeline import Figures, Span, Timeline

__all__ = ["Figures", "Span", "Timeline"]
