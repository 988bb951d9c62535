"""A statement that a lab hands in, compared with a profile, and verified without its device."""
