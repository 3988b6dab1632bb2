"""Use clusters over ssh: install ftkit there, send it files, and send it requests."""
