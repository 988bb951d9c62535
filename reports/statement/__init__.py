"""Statements: records that a lab hands in, and what is wrong with them."""
