"""Images: build, push, import and verify. Only this layer uses docker, registries, squashfs and SIF."""
