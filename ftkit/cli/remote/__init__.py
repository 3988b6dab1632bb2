"""`ftkit cluster connect`: clusters that are reached over ssh from this machine."""
