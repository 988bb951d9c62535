"""How a kernel is used: the questions asked of it, and what comparing the answers of its calls takes."""
