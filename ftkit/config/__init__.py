"""What the user says: recipes, cluster profiles, images and settings, checked as they are read."""
