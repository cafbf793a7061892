"""Evidence: which benchmarks there are, what is kept of them in docs/results, and the tables made of that.

`bench/report.py` is the command; docs/testing.md says how to use it. No module here measures anything.
"""
