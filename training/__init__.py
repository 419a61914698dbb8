"""Training: a typed config in, a trained model and a complete run directory out."""
