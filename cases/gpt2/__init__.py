"""A GPT-2 that trains for a moment with any attention kernel of the suite: model, data, monitors and snippets."""
