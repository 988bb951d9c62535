"""Studies: long runs that measure the suite, and what makes the tables of docs/. They are not in the wheel.

`python -m tiebreak.studies` makes the tables of docs/ anew; `make studies STUDY=NAME` runs what takes hours.
"""
