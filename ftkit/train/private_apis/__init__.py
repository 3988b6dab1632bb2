"""Every private or undocumented name of a library that the trainer uses: one module per library.

Each entry lists the versions that have the name, and what to do when it disappears. `tests/train/test_private_apis.py`
has a test for each, so that an upgrade fails there first.
"""
