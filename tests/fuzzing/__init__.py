"""Broken and hostile input, at random: `scripts/fuzz`, and for seconds among the tests.

An area makes cases, each a few files, from a random number generator, and knows what ftkit does with them. Whatever a
case holds, ftkit accepts it or refuses it: it raises nothing else, ends soon, and takes bounded memory.
"""
