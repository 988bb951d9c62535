"""Tables of runs, for a terminal and for elsewhere: one run, several side by side, training runs."""
