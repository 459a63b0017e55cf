"""What a model is: configurations, without torch."""
