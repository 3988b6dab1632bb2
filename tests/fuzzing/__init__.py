"""Fuzzing with malformed and hostile input: `scripts/fuzz`, and briefly as part of the tests.

An area generates cases (a few files each) from a random number generator and runs ftkit on them. ftkit must accept or
reject any case: without other exceptions, in limited time, and with bounded memory.
"""
