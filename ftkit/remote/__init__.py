"""Remote clusters over ssh: send files, and send requests to the ftkit there."""
