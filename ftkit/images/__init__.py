"""Images: build, push, import and verify. The only layer that knows docker, registries, squashfs and SIF."""
