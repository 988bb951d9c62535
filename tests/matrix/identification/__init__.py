"""Which rounding plan a kernel follows, from its outputs alone: designed inputs, the space of plans, the search."""
