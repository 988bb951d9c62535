"""What a lab hands in, held to a profile, and verified without its device."""
