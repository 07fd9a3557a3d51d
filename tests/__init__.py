"""Tests mirror the three packages. They compare bits where the engine promises bits.

Marks such as B25 in a test's docstring number a fault that users of other engines have reported: the test sets up what
they had done, and holds that nothing of the kind happens here.
"""
