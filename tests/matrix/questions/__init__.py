"""Questions: two calls that should agree, which the field calls metamorphic relations.

A question is a function that makes the calls of one session, and its row in the table of its module: `usage`, calls on
the same numbers that must not differ by more than rounding explains, or `invariance`, calls on ever more heads whose
differences must have no bias, each with a control, which must differ.
"""
