"""Capture the attention calls of any torch model as it trains, as cases for the matrix (docs/your-kernel.md)."""

from tiebreak.cases.capture.session import Capture, capture
from tiebreak.cases.capture.watch import AttentionModule, CaptureError

__all__ = ["AttentionModule", "Capture", "CaptureError", "capture"]
