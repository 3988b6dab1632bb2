"""Every private or undocumented name of a library that the trainer uses; `libraries` has those of smaller ones.

`tests/train/test_private_apis.py` has a test for each, so that an upgrade that removes one fails there first.
"""
