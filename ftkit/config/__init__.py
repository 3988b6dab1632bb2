"""User input: recipes, cluster profiles, images and settings, validated while they are read."""
