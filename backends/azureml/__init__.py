"""Azure Machine Learning command jobs."""
