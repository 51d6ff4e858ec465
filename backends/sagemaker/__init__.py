"""Amazon SageMaker training jobs."""
