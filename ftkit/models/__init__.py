"""What is known of models without torch: families, shapes, folders, weight files, parameters."""
