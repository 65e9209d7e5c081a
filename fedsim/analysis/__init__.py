"""What is made of the records of many runs: comparisons, tables, figures, reports; without torch, ray or flwr."""

from fedsim.analysis.compare import compare
from fedsim.analysis.comparison import Comparison

__all__ = ["Comparison", "compare"]
