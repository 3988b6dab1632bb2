"""Images: build, push, import and verify. Only this package uses docker, registries, squashfs and SIF."""
