"""Every private or undocumented name of a library that the trainer uses.

torch, transformers and DeepSpeed have a module each; `libraries` has the few names of the others.

Each entry lists the versions that have the name, and what to do when it disappears. `tests/train/test_private_apis.py`
has a test for each, so that an upgrade fails there first.
"""
