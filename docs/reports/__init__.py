"""Findings in other people's software, and the scripts by which `tiebreak findings` asks for them."""
