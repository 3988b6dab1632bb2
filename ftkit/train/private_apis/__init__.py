"""All private or undocumented names of libraries that the trainer uses; `libraries` has those of smaller libraries.

`tests/train/test_private_apis.py` tests each one, so that an upgrade that removes it fails there first.
"""
